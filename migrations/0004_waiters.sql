-- Waiters: who queues for a lease, first come first served, within a rank: elections prefer candidates by it,
-- everybody else has rank 0.
--
-- A ticket is alive while its owner is; nobody renews it. Whoever frees a lease, or finds it free, grants it
-- to the oldest living ticket in the same statement. Nothing is notified here: NOTIFY in a transaction that
-- waits for the disk serialises all such commits of the database. The functions return whom to wake instead
-- (a channel and a payload for pg_notify), to be sent after the commit, by the caller. It is a hint: a waiter
-- that hears nothing asks again (acquire, with the same grant id).
--
-- Unlogged: a queue is worth no disk write. After a crash of the server it is empty, and waiters that ask
-- again queue again.

CREATE UNLOGGED TABLE fencepost.waiters (
    ticket   bigint   GENERATED ALWAYS AS IDENTITY,
    name     text     NOT NULL,
    rank     integer  NOT NULL DEFAULT 0,
    owner    uuid     NOT NULL,
    grant_id uuid     NOT NULL UNIQUE,
    at_most  interval,
    permits  integer,   -- of a semaphore: how many
    metadata jsonb,
    PRIMARY KEY (name, rank, ticket)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
REVOKE ALL ON fencepost.waiters FROM PUBLIC;

-- hand_to_head(name): internal. The lease's row is locked FOR UPDATE and it is free: grants it to the oldest
-- living ticket of the smallest rank. No row: nobody waits. A row of nulls: not decided, ask again soon, since the head's owner has
-- expired and its row is locked: by a heartbeat that was in time, or by somebody who marks it dead. (Waiting for
-- it here, with another owner's row locked already, could deadlock.) Tickets of the dead are thrown away on the
-- way, and then their owner is marked, so that it cannot come back without its place. A ticket that is being
-- withdrawn is locked and skipped.
--
-- The channel is the process's, a digest of its owner id; the payload is "ticket token digest", and the
-- digest of grant id and token proves to the waiter, who alone knows the id, that it was granted: anybody
-- may listen, and anybody may notify.
CREATE FUNCTION fencepost.hand_to_head(p_name text)
RETURNS TABLE (grant_id uuid, token bigint, label text, remaining interval, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_head  fencepost.waiters%ROWTYPE;
    v_life  timestamptz;
    v_label text;
    v_lease fencepost.leases%ROWTYPE;
BEGIN
    LOOP
        SELECT w.* INTO v_head FROM fencepost.waiters w WHERE w.name = p_name
         ORDER BY w.rank, w.ticket LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        SELECT o.expires_at, o.label INTO v_life, v_label FROM fencepost.owners o WHERE o.id = v_head.owner;
        IF FOUND AND v_life > 'epoch' AND v_life <= clock_timestamp() THEN
            SELECT o.expires_at INTO v_life FROM fencepost.owners o WHERE o.id = v_head.owner FOR NO KEY UPDATE SKIP LOCKED;
            IF NOT FOUND THEN
                RETURN NEXT;
                RETURN;
            END IF;
            IF v_life <= clock_timestamp() THEN
                UPDATE fencepost.owners o SET expires_at = 'epoch' WHERE o.id = v_head.owner;
            END IF;
        END IF;
        DELETE FROM fencepost.waiters w
         WHERE w.name = p_name AND w.rank = v_head.rank AND w.ticket = v_head.ticket;
        EXIT WHEN v_life > clock_timestamp();
    END LOOP;
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    UPDATE fencepost.leases l
       SET token = nextval('fencepost.fencing_token'), grant_id = v_head.grant_id, owner = v_head.owner,
           label = v_label, granted_at = clock_timestamp(), expires_at = clock_timestamp() + v_head.at_most,
           released_at = NULL, metadata = v_head.metadata
     WHERE l.name = p_name
    RETURNING l.* INTO v_lease;
    RETURN QUERY SELECT
        v_lease.grant_id, v_lease.token, v_label, least(v_life, v_lease.expires_at) - clock_timestamp(),
        'fencepost_' || left(encode(sha256(uuid_send(v_head.owner)), 'hex'), 40),   -- as wake_channel
        v_head.ticket || ' ' || v_lease.token || ' '
            || encode(sha256(uuid_send(v_lease.grant_id) || int8send(v_lease.token)), 'hex');
END $$;
REVOKE ALL ON FUNCTION fencepost.hand_to_head(text) FROM PUBLIC;

-- wake_channel(owner): where the process of this owner listens.
CREATE FUNCTION fencepost.wake_channel(p_owner uuid) RETURNS text
LANGUAGE sql IMMUTABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT 'fencepost_' || left(encode(sha256(uuid_send(p_owner)), 'hex'), 40)
$$;
REVOKE ALL ON FUNCTION fencepost.wake_channel(uuid) FROM PUBLIC;

-- hand_over(name): for a lease that was released while a fenced write was open, so that nobody could be
-- granted it: grants it to the head now, if the write has ended. waiting: somebody still waits, ask again.
-- (Of a semaphore: a row for each that was granted permits.)
CREATE FUNCTION fencepost.hand_over(p_name text)
RETURNS TABLE (waiting boolean, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_lease fencepost.leases%ROWTYPE;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.hand_over needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF starts_with(p_name, 'fencepost:semaphore:') THEN
        RETURN QUERY SELECT * FROM fencepost.permit_hand_over(substr(p_name, 21));
        RETURN;
    END IF;
    waiting := EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = p_name);
    IF waiting THEN
        SELECT l.* INTO v_lease FROM fencepost.leases l WHERE l.name = p_name FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            waiting := false;   -- granted now, or held by somebody again: their release hands it on
            IF v_lease.released_at IS NOT NULL OR v_lease.expires_at <= clock_timestamp() THEN
                SELECT h.grant_id IS NULL, h.wake_channel, h.wake_payload INTO waiting, wake_channel, wake_payload
                  FROM fencepost.hand_to_head(p_name) h;
                waiting := coalesce(waiting, false);
            END IF;
        END IF;
    END IF;
    RETURN NEXT;
END $$;
REVOKE ALL ON FUNCTION fencepost.hand_over(text) FROM PUBLIC;

-- withdraw(name, grant_id): the waiter has given up. Its ticket is taken back; if it was granted meanwhile,
-- the grant is released, and handed to the next one.
CREATE FUNCTION fencepost.withdraw(p_name text, p_grant_id uuid)
RETURNS TABLE (withdrawn boolean, waiting boolean, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_token bigint;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.withdraw needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    -- Waits for a hand-over to this ticket that is under way.
    DELETE FROM fencepost.waiters w WHERE w.grant_id = p_grant_id;
    withdrawn := FOUND;
    waiting := false;
    IF starts_with(p_name, 'fencepost:semaphore:') THEN
        IF NOT withdrawn THEN
            SELECT p.token INTO v_token FROM fencepost.permits p
             WHERE p.semaphore = substr(p_name, 21) AND p.grant_id = p_grant_id AND p.released_at IS NULL LIMIT 1;
        END IF;
        -- Its ticket may have been all that the others waited for.
        IF v_token IS NOT NULL THEN
            RETURN QUERY SELECT withdrawn, r.waiting, r.wake_channel, r.wake_payload
                           FROM fencepost.permit_release(substr(p_name, 21), v_token, p_grant_id) r;
        ELSE
            RETURN NEXT;
            RETURN QUERY SELECT withdrawn, h.waiting, h.wake_channel, h.wake_payload
                           FROM fencepost.permit_hand_over(substr(p_name, 21)) h;
        END IF;
        RETURN;
    END IF;
    IF NOT withdrawn THEN
        SELECT l.token INTO v_token FROM fencepost.leases l
         WHERE l.name = p_name AND l.grant_id = p_grant_id AND l.released_at IS NULL;
        IF FOUND THEN
            SELECT r.waiting, r.wake_channel, r.wake_payload INTO waiting, wake_channel, wake_payload
              FROM fencepost.release(p_name, v_token, p_grant_id) r;
        END IF;
    END IF;
    RETURN NEXT;
END $$;
REVOKE ALL ON FUNCTION fencepost.withdraw(text, uuid) FROM PUBLIC;
