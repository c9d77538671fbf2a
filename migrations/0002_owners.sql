-- Owners: one row is one start of one process, alive by heartbeat.
--
-- Everything a process holds belongs to its owner row and lives exactly as long as it does, so one
-- row update renews any number of leases. Dead is final: whoever finds an owner expired locks the
-- row, judges again and *writes* the mark (expires_at = 'epoch'), so that a heartbeat in flight
-- fails. A missing row is a dead owner.
--
-- In every function of this schema: SET search_path, because an operator or a type of the caller's
-- search_path or temporary schema would otherwise run with the rights of the definer; and a moment is
-- judged by clock_timestamp() in a statement that starts *after* the row lock is held, because a
-- condition in the locking statement is evaluated before the wait and not always again after it.

CREATE TABLE fencepost.owners (
    id         uuid        PRIMARY KEY,
    label      text        NOT NULL,
    ttl        interval    NOT NULL,
    started_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    -- How often an operator has ended a hold of it: the process is told by its next heartbeat.
    revocations integer    NOT NULL DEFAULT 0
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
-- No index on expires_at: it would end HOT updates, one dead index entry a beat.
REVOKE ALL ON fencepost.owners FROM PUBLIC;

-- owner_start(label, ttl): a new owner, alive for ttl. Returns its id, which is a secret of the
-- process: whoever knows it can beat for it and stop it.
CREATE FUNCTION fencepost.owner_start(p_label text, p_ttl interval) RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id uuid := gen_random_uuid();
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.owner_start needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_ttl IS NULL OR p_ttl < interval '10 milliseconds' OR p_ttl > interval '24 hours' THEN
        RAISE EXCEPTION 'a ttl is 10 milliseconds to 24 hours, not %', p_ttl USING ERRCODE = 'LK005';
    END IF;
    IF p_label IS NULL OR octet_length(p_label) NOT BETWEEN 1 AND 255 THEN
        RAISE EXCEPTION 'a label is 1 to 255 bytes' USING ERRCODE = 'LK005';
    END IF;
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    INSERT INTO fencepost.owners (id, label, ttl, started_at, expires_at)
    VALUES (v_id, p_label, p_ttl, clock_timestamp(), clock_timestamp() + p_ttl);
    RETURN v_id;
END $$;
REVOKE ALL ON FUNCTION fencepost.owner_start(text, interval) FROM PUBLIC;

-- heartbeat(owner): the remaining life, or no row: dead, for ever. An UPDATE of a living row, never
-- an upsert: that would bring a dead owner back.
CREATE FUNCTION fencepost.heartbeat(p_owner uuid) RETURNS TABLE (remaining interval, revocations integer)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.heartbeat needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    -- A crash must not take back a life that somebody relied on.
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM FROM fencepost.owners o WHERE o.id = p_owner FOR NO KEY UPDATE;
    RETURN QUERY
        UPDATE fencepost.owners o SET expires_at = clock_timestamp() + o.ttl
         WHERE o.id = p_owner AND o.expires_at > clock_timestamp()
        RETURNING o.expires_at - clock_timestamp(), o.revocations;
END $$;
REVOKE ALL ON FUNCTION fencepost.heartbeat(uuid) FROM PUBLIC;

-- owner_stop(owner): frees what the owner holds, hands it on, and ends it. A row for each lease that it freed,
-- with whom to wake.
-- Its tickets, then its leases by name, then its permits, then its row. A lease locked by somebody else is left to them: its
-- holder is dead once this commits.
CREATE FUNCTION fencepost.owner_stop(p_owner uuid)
RETURNS TABLE (name text, waiting boolean, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.owner_stop needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    DELETE FROM fencepost.waiters w WHERE w.owner = p_owner;
    -- NO KEY UPDATE passes the KEY SHARE of open fences: stopping never waits for a write.
    FOR name IN
        SELECT l.name FROM fencepost.leases l WHERE l.owner = p_owner AND l.released_at IS NULL
         ORDER BY l.name FOR NO KEY UPDATE SKIP LOCKED
    LOOP
        UPDATE fencepost.leases l SET released_at = clock_timestamp() WHERE l.name = owner_stop.name;
        SELECT h.waiting, h.wake_channel, h.wake_payload INTO waiting, wake_channel, wake_payload
          FROM fencepost.hand_over(owner_stop.name) h;
        RETURN NEXT;
    END LOOP;
    -- A semaphore that somebody is at is left to them, too.
    FOR name IN
        SELECT s.name FROM fencepost.semaphores s
         WHERE EXISTS (SELECT FROM fencepost.permits p
                        WHERE p.semaphore = s.name AND p.owner = p_owner AND p.released_at IS NULL)
         ORDER BY s.name FOR NO KEY UPDATE SKIP LOCKED
    LOOP
        UPDATE fencepost.permits p SET released_at = clock_timestamp(), was_held = true
         WHERE p.semaphore = owner_stop.name AND p.owner = p_owner AND p.released_at IS NULL;
        FOR waiting, wake_channel, wake_payload IN
            SELECT h.waiting, h.wake_channel, h.wake_payload FROM fencepost.permit_hand_over(owner_stop.name) h
        LOOP
            RETURN NEXT;
        END LOOP;
    END LOOP;
    UPDATE fencepost.owners o SET expires_at = 'epoch' WHERE o.id = p_owner AND o.expires_at > 'epoch';
END $$;
REVOKE ALL ON FUNCTION fencepost.owner_stop(uuid) FROM PUBLIC;
