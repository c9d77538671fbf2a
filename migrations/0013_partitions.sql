-- Partitions: the members of a group share out so many partitions, and each partition is a lease.
--
-- A member is alive while its owner is; nobody renews it. Each asks, round by round, how things stand, and takes
-- what is free, or gives up what is over its share: nobody takes from the living. Who writes for a partition is
-- decided by its lease alone; the shares are only about who should.

CREATE TABLE fencepost.groups (
    name       text    PRIMARY KEY,
    partitions integer NOT NULL,
    -- The members among whom everything was shared out when somebody last looked; null: it was not.
    settled    uuid[]
);
REVOKE ALL ON fencepost.groups FROM PUBLIC;

CREATE TABLE fencepost.members (
    group_name text    NOT NULL,
    owner      uuid    NOT NULL,
    joined     bigint  GENERATED ALWAYS AS IDENTITY,
    -- How many partitions it had when it last looked.
    held       integer NOT NULL,
    PRIMARY KEY (group_name, owner)
);
REVOKE ALL ON fencepost.members FROM PUBLIC;

-- partition_lease(group, number): the lease of a partition. It has a tab in it, which no name may have that people
-- choose: so it is nobody else's.
CREATE FUNCTION fencepost.partition_lease(p_group text, p_number integer) RETURNS text
LANGUAGE sql IMMUTABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT p_group || E'\t' || p_number
$$;
REVOKE ALL ON FUNCTION fencepost.partition_lease(text, integer) FROM PUBLIC;

-- partition_for(key, partitions): where a key belongs: the first four bytes of its SHA-256 as an unsigned number, the
-- first byte first, modulo the number of partitions. Never to be changed.
CREATE FUNCTION fencepost.partition_for(p_key bytea, p_partitions integer) RETURNS integer
LANGUAGE sql IMMUTABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT (('x' || left(encode(sha256(p_key), 'hex'), 8))::bit(32)::bigint % p_partitions)::integer
$$;
REVOKE ALL ON FUNCTION fencepost.partition_for(bytea, integer) FROM PUBLIC;

-- member_round(group, partitions, owner, held): joins the group if need be, and says how things stand. p_held is how
-- many partitions the member knows it has.
--
--   settled   everything is shared out, and nothing has happened since: nothing to do, and the rest is null
--   held      how many each living member has, in the order in which they joined
--   position  which of them is the caller, from 0
--   free      the numbers of the partitions that are free (or soon: a fenced write of a dead holder may be open)
--
-- Settled it is one look at the members, whatever the number of partitions, and writes nothing. Otherwise each lease
-- of the group is looked at, under the lock of the group's row. Another number of partitions than the group has is
-- LK010 as long as a member or a holder lives, or a fenced write is open: keys belong elsewhere then.
CREATE FUNCTION fencepost.member_round(p_group text, p_partitions integer, p_owner uuid, p_held integer)
RETURNS TABLE (settled boolean, "position" integer, held integer[], free integer[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_group  fencepost.groups%ROWTYPE;
    v_found  boolean;
    v_alive  uuid[];     -- the living members, by id
    v_known  boolean;    -- the caller is one of them, and has what it had
    v_joined uuid[];     -- the living members, in the order in which they joined
    v_names  text[];     -- the leases of the group
    v_locked bigint;
    v_owner  uuid;
    v_life   timestamptz;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.member_round needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_group IS NULL OR octet_length(p_group) NOT BETWEEN 1 AND 250 OR p_group ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a group''s name is 1 to 250 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    IF p_partitions IS NULL OR p_partitions NOT BETWEEN 1 AND 4096 THEN
        RAISE EXCEPTION 'a group has 1 to 4096 partitions, not %', p_partitions USING ERRCODE = 'LK005';
    END IF;
    IF p_owner IS NULL OR p_held IS NULL THEN
        RAISE EXCEPTION 'a member has an owner, and says what it has' USING ERRCODE = 'LK005';
    END IF;

    -- 1. Look, without a lock.
    SELECT g.* INTO v_group FROM fencepost.groups g WHERE g.name = p_group;
    v_found := FOUND;
    SELECT array_agg(m.owner ORDER BY m.owner), bool_or(m.owner = p_owner AND m.held = p_held) INTO v_alive, v_known
      FROM fencepost.members m JOIN fencepost.owners o ON o.id = m.owner
     WHERE m.group_name = p_group AND o.expires_at > clock_timestamp();
    IF v_known AND v_group.partitions = p_partitions AND v_group.settled = v_alive THEN
        settled := true;
        RETURN NEXT;
        RETURN;
    END IF;

    -- 2. One at a time from here on. (Not for long behind somebody's open transaction: 55P03, ask again.)
    IF current_setting('lock_timeout') = '0' THEN
        PERFORM set_config('lock_timeout', '100ms', true);
    END IF;
    IF NOT v_found THEN
        INSERT INTO fencepost.groups (name, partitions) VALUES (p_group, p_partitions) ON CONFLICT DO NOTHING;
    END IF;
    SELECT g.* INTO v_group FROM fencepost.groups g WHERE g.name = p_group FOR NO KEY UPDATE;

    -- 3. Another number of partitions: only when nobody can write by the old one any more.
    IF v_group.partitions <> p_partitions THEN
        v_names := ARRAY(SELECT fencepost.partition_lease(p_group, n) FROM generate_series(0, v_group.partitions - 1) n);
        SELECT count(*) INTO v_locked FROM (
            SELECT FROM fencepost.leases l WHERE l.name = ANY (v_names) ORDER BY l.name FOR UPDATE SKIP LOCKED) AS locked;
        IF v_locked < (SELECT count(*) FROM fencepost.leases l WHERE l.name = ANY (v_names)) THEN
            v_life := 'infinity';
        ELSE
            FOR v_owner IN
                SELECT m.owner FROM fencepost.members m WHERE m.group_name = p_group
                UNION
                SELECT l.owner FROM fencepost.leases l WHERE l.name = ANY (v_names) AND l.released_at IS NULL
                ORDER BY 1
            LOOP
                SELECT o.expires_at INTO v_life FROM fencepost.owners o WHERE o.id = v_owner FOR NO KEY UPDATE;
                EXIT WHEN v_life > clock_timestamp();
                UPDATE fencepost.owners o SET expires_at = 'epoch' WHERE o.id = v_owner AND o.expires_at > 'epoch';
            END LOOP;
        END IF;
        IF v_life > clock_timestamp() THEN
            RAISE EXCEPTION 'group "%" has % partitions, not %, and is in use', p_group, v_group.partitions, p_partitions
                  USING ERRCODE = 'LK010',
                        DETAIL = jsonb_build_object('name', p_group, 'partitions', v_group.partitions),
                        HINT = 'Let all its members leave before one joins with another number.';
        END IF;
        -- Written, not only locked: so that a fence whose snapshot is older than this does not pass either.
        UPDATE fencepost.leases l SET released_at = clock_timestamp(), expires_at = 'epoch' WHERE l.name = ANY (v_names);
        UPDATE fencepost.groups g SET partitions = p_partitions, settled = NULL WHERE g.name = p_group;
    END IF;

    -- 4. A lease for each partition: free ones, as acquire makes them.
    v_names := ARRAY(SELECT fencepost.partition_lease(p_group, n) FROM generate_series(0, p_partitions - 1) n);
    IF (SELECT count(*) FROM fencepost.leases l WHERE l.name = ANY (v_names)) < p_partitions THEN
        INSERT INTO fencepost.leases (name, token, grant_id, label, granted_at, expires_at, released_at)
        SELECT n, 0, gen_random_uuid(), 'nobody', clock_timestamp(), 'epoch', clock_timestamp()
          FROM unnest(v_names) n ORDER BY n
        ON CONFLICT ON CONSTRAINT leases_pkey DO NOTHING;
    END IF;

    -- 5. The living members, with the caller.
    INSERT INTO fencepost.members (group_name, owner, held) VALUES (p_group, p_owner, 0) ON CONFLICT DO NOTHING;
    DELETE FROM fencepost.members m
     WHERE m.group_name = p_group
       AND NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = m.owner AND o.expires_at > 'epoch');
    SELECT array_agg(m.owner ORDER BY m.joined), array_agg(m.owner ORDER BY m.owner) INTO v_joined, v_alive
      FROM fencepost.members m JOIN fencepost.owners o ON o.id = m.owner
     WHERE m.group_name = p_group AND o.expires_at > clock_timestamp();
    IF coalesce(p_owner <> ALL (v_joined), true) THEN
        RAISE EXCEPTION 'the owner of this member of group "%" is dead', p_group USING ERRCODE = 'LK003';
    END IF;

    -- 6. Who has what.
    WITH holder AS (
        SELECT n - 1 AS number, CASE WHEN l.released_at IS NULL AND l.expires_at IS NULL AND o.expires_at > clock_timestamp()
                                     THEN l.owner END AS owner
          FROM unnest(v_names) WITH ORDINALITY AS names (name, n)
          JOIN fencepost.leases l ON l.name = names.name
          LEFT JOIN fencepost.owners o ON o.id = l.owner)
    SELECT ARRAY(SELECT (SELECT count(*)::integer FROM holder h WHERE h.owner = j.owner)
                   FROM unnest(v_joined) WITH ORDINALITY AS j (owner, n) ORDER BY j.n),
           ARRAY(SELECT h.number::integer FROM holder h WHERE h.owner IS NULL ORDER BY h.number)
      INTO held, free;
    "position" := array_position(v_joined, p_owner) - 1;
    settled := false;
    UPDATE fencepost.members m SET held = member_round.held["position" + 1]
     WHERE m.group_name = p_group AND m.owner = p_owner AND m.held <> member_round.held["position" + 1];
    IF (SELECT sum(h) = p_partitions AND max(h) - min(h) <= 1 FROM unnest(held) h) THEN
        UPDATE fencepost.groups g SET settled = v_alive WHERE g.name = p_group AND g.settled IS DISTINCT FROM v_alive;
    ELSE
        UPDATE fencepost.groups g SET settled = NULL WHERE g.name = p_group AND g.settled IS NOT NULL;
    END IF;
    RETURN NEXT;
END $$;
REVOKE ALL ON FUNCTION fencepost.member_round(text, integer, uuid, integer) FROM PUBLIC;

-- member_leave(group, owner): it is a member no more, so the others' shares grow. What it has is its own to release.
CREATE FUNCTION fencepost.member_leave(p_group text, p_owner uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.member_leave needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    DELETE FROM fencepost.members m WHERE m.group_name = p_group AND m.owner = p_owner;
END $$;
REVOKE ALL ON FUNCTION fencepost.member_leave(text, uuid) FROM PUBLIC;
