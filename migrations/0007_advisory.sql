-- Advisory locks: the number that stands for a name, and the names for people to read.
--
-- The locks themselves are Postgres's own; nothing here takes one.

-- advisory_key(namespace, name): the number that the library locks for a name. Frozen for ever: SHA-256 over the
-- namespace, the text 'advisory' and the name, each behind its length in bytes (four, most significant first); the
-- first eight bytes of the digest, most significant first.
--
--     SELECT pg_advisory_xact_lock(fencepost.advisory_key('billing', 'nightly-report'));
CREATE FUNCTION fencepost.advisory_key(p_namespace text, p_name text) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_namespace bytea := convert_to(p_namespace, 'UTF8');
    v_name      bytea := convert_to(p_name, 'UTF8');
BEGIN
    IF p_namespace IS NULL OR length(v_namespace) NOT BETWEEN 1 AND 255 OR p_namespace ~ '[\x01-\x1f\x7f]'
       OR p_name IS NULL OR length(v_name) NOT BETWEEN 1 AND 255 OR p_name ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a namespace and a name are 1 to 255 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    RETURN ('x' || encode(substr(sha256(
        int4send(length(v_namespace)) || v_namespace || int4send(8) || 'advisory'::bytea || int4send(length(v_name)) || v_name),
        1, 8), 'hex'))::bit(64)::bigint;
END $$;
REVOKE ALL ON FUNCTION fencepost.advisory_key(text, text) FROM PUBLIC;

-- What keys are called, by where pg_locks shows them: the halves of a bigint and 1, or a pair of integers and 2.
CREATE TABLE fencepost.advisory_names (
    classid  oid         NOT NULL,
    objid    oid         NOT NULL,
    objsubid smallint    NOT NULL,
    name     text        NOT NULL,
    noted_at timestamptz NOT NULL,
    PRIMARY KEY (classid, objid, objsubid)
);
REVOKE ALL ON fencepost.advisory_names FROM PUBLIC;

-- advisory_note(classid, objid, objsubid, name): for people only; nothing is decided by it.
CREATE FUNCTION fencepost.advisory_note(p_classid oid, p_objid oid, p_objsubid smallint, p_name text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_classid IS NULL OR p_objid IS NULL OR p_objsubid IS NULL OR p_objsubid NOT IN (1, 2)
       OR p_name IS NULL OR octet_length(p_name) NOT BETWEEN 1 AND 511 OR p_name ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a key as pg_locks shows it, and a name of 1 to 511 bytes without control characters'
            USING ERRCODE = 'LK005';
    END IF;
    INSERT INTO fencepost.advisory_names AS n (classid, objid, objsubid, name, noted_at)
    VALUES (p_classid, p_objid, p_objsubid, p_name, clock_timestamp())
    ON CONFLICT (classid, objid, objsubid) DO UPDATE SET name = EXCLUDED.name, noted_at = EXCLUDED.noted_at;
END $$;
REVOKE ALL ON FUNCTION fencepost.advisory_note(oid, oid, smallint, text) FROM PUBLIC;

-- advisory_locks(): who holds and who waits for which advisory lock of this database, under readable names.
CREATE FUNCTION fencepost.advisory_locks()
RETURNS TABLE (name text, key text, shared boolean, granted boolean, pid integer, application_name text, waiting_since timestamptz)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT n.name,
           CASE l.objsubid WHEN 1 THEN ((l.classid::bigint << 32) | l.objid::bigint)::text
                           ELSE format('(%s, %s)', l.classid::int4, l.objid::int4) END,
           l.mode = 'ShareLock', l.granted, l.pid, a.application_name, l.waitstart
      FROM pg_locks l
      LEFT JOIN fencepost.advisory_names n
             ON n.classid = l.classid AND n.objid = l.objid AND n.objsubid = l.objsubid
      LEFT JOIN pg_stat_activity a ON a.pid = l.pid
     WHERE l.locktype = 'advisory' AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
     ORDER BY 1, 2, l.granted DESC, l.waitstart
$$;
REVOKE ALL ON FUNCTION fencepost.advisory_locks() FROM PUBLIC;
