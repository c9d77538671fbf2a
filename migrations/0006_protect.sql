-- protect: a fence that cannot be forgotten. A statement that writes to a protected table fails unless
-- its transaction has passed the fence of the table's lease.

-- The credential (fencepost.passed) is a setting of the transaction, which any session can write, so it
-- is only a claim: the pair in it is compared with the lease row, under the lock that a fence holds. Life
-- is not judged again: the fence was passed and the lock keeps everybody else out until the end.
CREATE FUNCTION fencepost.require_fence() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_passed text := coalesce(current_setting('fencepost.passed', true), '');
    v_token  bigint;
    v_grant  uuid;
BEGIN
    IF v_passed <> '' THEN
        SELECT l.token, l.grant_id INTO v_token, v_grant FROM fencepost.leases l
         WHERE l.name = TG_ARGV[0] FOR KEY SHARE;
        IF FOUND AND position(v_grant || '/' || v_token || ';' IN v_passed) > 0 THEN
            RETURN NULL;
        END IF;
    END IF;
    RAISE EXCEPTION 'unfenced write: table %.% is protected by lease "%"', TG_TABLE_SCHEMA, TG_TABLE_NAME, TG_ARGV[0]
          USING ERRCODE = 'LK006',
                DETAIL = jsonb_build_object('table', format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME), 'name', TG_ARGV[0]),
                HINT = 'Pass fencepost.fence(name, token, grant_id) earlier in the same transaction.';
END $$;
REVOKE ALL ON FUNCTION fencepost.require_fence() FROM PUBLIC;

-- protect(table, lease): installs the trigger on the table and on each of its partitions or children, since a
-- statement fires the triggers of the table it names. Call it again after adding one. For the same reason it
-- takes no partition or child by itself: a statement that names the parent would write to it unnoticed.
-- AFTER each statement, so that a fence in the statement itself counts.
-- SECURITY INVOKER and granted to nobody: it needs the rights of the table's owner, and has no others.
CREATE FUNCTION fencepost.protect(p_table regclass, p_lease text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_parent regclass := (SELECT i.inhparent FROM pg_inherits i WHERE i.inhrelid = p_table LIMIT 1);
    v_table  regclass;
BEGIN
    IF p_lease IS NULL OR octet_length(p_lease) NOT BETWEEN 1 AND 255 OR p_lease ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a lease name is 1 to 255 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    IF p_table IS NULL THEN
        RAISE EXCEPTION 'protect takes a table, not null' USING ERRCODE = 'LK005';
    END IF;
    IF v_parent IS NOT NULL THEN
        RAISE EXCEPTION '% is a part of %: protect that one', p_table, v_parent
              USING ERRCODE = 'LK005', HINT = 'A statement that names the parent would pass a trigger of the part.';
    END IF;
    FOR v_table IN SELECT t.relid FROM fencepost.parts(p_table) t LOOP
        EXECUTE format(
            'CREATE OR REPLACE TRIGGER fencepost_fence AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s '
            'FOR EACH STATEMENT EXECUTE FUNCTION fencepost.require_fence(%L)', v_table, p_lease);
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION fencepost.protect(regclass, text) FROM PUBLIC;

-- unprotect(table): takes the triggers away again.
CREATE FUNCTION fencepost.unprotect(p_table regclass) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_table regclass;
BEGIN
    IF p_table IS NULL THEN
        RAISE EXCEPTION 'unprotect takes a table, not null' USING ERRCODE = 'LK005';
    END IF;
    -- First, with its parts: DROP TRIGGER locks the trigger before the table, and two at once would deadlock.
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', p_table);
    FOR v_table IN SELECT t.relid FROM fencepost.parts(p_table) t LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS fencepost_fence ON %s', v_table);
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION fencepost.unprotect(regclass) FROM PUBLIC;

-- parts(table): the table, its partitions and children, and theirs.
CREATE FUNCTION fencepost.parts(p_table regclass) RETURNS TABLE (relid regclass)
LANGUAGE sql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $$
    WITH RECURSIVE part AS (
        SELECT p_table AS relid
        UNION
        SELECT i.inhrelid::regclass FROM part JOIN pg_inherits i ON i.inhparent = part.relid)
    SELECT part.relid FROM part
$$;
REVOKE ALL ON FUNCTION fencepost.parts(regclass) FROM PUBLIC;
