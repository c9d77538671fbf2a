-- Leases: a name, and the grant that holds it or held it last.
--
-- A grant is the pair (token, grant_id). The token orders grants; the grant id, a fresh uuid of each
-- acquire, tells apart two grants with one token, which an asynchronous failover can produce.
-- Holding is being granted and not released, by a living owner (or none), before the cap (if any):
--
--     released_at IS NULL AND (owner IS NULL OR owner alive) AND (expires_at IS NULL OR expires_at > clock)
--
-- The row outlives the release, so that tokens of a name never restart.

CREATE TABLE fencepost.leases (
    name        text        PRIMARY KEY,
    token       bigint      NOT NULL CHECK (token >= 0),
    grant_id    uuid        NOT NULL,
    owner       uuid,       -- null: held without a heartbeat, until expires_at
    label       text        NOT NULL,
    granted_at  timestamptz NOT NULL,
    expires_at  timestamptz,-- null: as long as the owner lives
    released_at timestamptz,
    metadata    jsonb,
    CHECK (owner IS NOT NULL OR expires_at IS NOT NULL)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
-- No other index: every grant and release stays a HOT update.
REVOKE ALL ON fencepost.leases FROM PUBLIC;

-- acquire(name, …): the lease for this grant id, or who holds it.
--
--   granted   token, grant_id, remaining life, and what is left of p_at_most (it may have been granted earlier)
--   refused   the holder's token, label and remaining life (an upper bound: it may beat again);
--             remaining <= 0: its time is over and a fenced write of it is still open: soon free.
--             With p_enqueue a ticket, and how many were ahead of it.
--
-- With an owner it lives as long as the owner, and p_at_most caps the hold. Without one p_at_most is
-- its whole life (SET NX PX style). A lease that is free and has a queue goes to the head of the queue,
-- whoever asks; wake_channel and wake_payload then say whom to notify.
--
-- p_retry: an earlier call with this grant id may be under way; wait for its transaction and answer as it
-- did. p_enqueue: leave a ticket instead of going away; ask again with the same grant id to learn what
-- became of it. p_rank: tickets of a smaller rank are served before. Neither waits for an open fence. (A first grant of a name waits for another first one that
-- is not committed: call this in a transaction of its own.)
CREATE FUNCTION fencepost.acquire(
    p_name     text,
    p_owner    uuid     DEFAULT NULL,
    p_grant_id uuid     DEFAULT pg_catalog.gen_random_uuid(),
    p_at_most  interval DEFAULT NULL,
    p_metadata jsonb    DEFAULT NULL,
    p_label    text     DEFAULT NULL,
    p_retry    boolean  DEFAULT false,
    p_enqueue  boolean  DEFAULT false,
    p_rank     integer  DEFAULT 0)
RETURNS TABLE (granted boolean, token bigint, grant_id uuid, label text, remaining interval, cap interval,
               ticket bigint, ahead bigint, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_lease     fencepost.leases%ROWTYPE;
    v_locked    fencepost.leases%ROWTYPE;
    v_found     boolean;
    v_held      boolean;
    v_life      timestamptz;  -- until when the holder's owner lives
    v_own_life  timestamptz;  -- until when the caller's owner lives
    v_own_label text := coalesce(p_label, session_user);
    v_head      record;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.acquire needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_grant_id IS NULL THEN
        RAISE EXCEPTION 'a grant id is not null' USING ERRCODE = 'LK005';
    END IF;
    IF octet_length(v_own_label) NOT BETWEEN 1 AND 255 THEN
        RAISE EXCEPTION 'a label is 1 to 255 bytes' USING ERRCODE = 'LK005';
    END IF;
    IF p_owner IS NULL AND (p_at_most IS NULL OR p_enqueue) THEN
        RAISE EXCEPTION 'without an owner a lease needs p_at_most, and cannot be waited for' USING ERRCODE = 'LK005';
    END IF;
    IF p_at_most < interval '1 millisecond' OR p_at_most > interval '366 days' THEN
        RAISE EXCEPTION 'p_at_most is 1 millisecond to 366 days, not %', p_at_most USING ERRCODE = 'LK005';
    END IF;
    granted := false;

    -- 1. Look, without a lock: a refused try costs neither a transaction id nor a byte of WAL, and a waiter
    -- that asks again does not either. The ticket first: if it is gone by now, the grant is seen below.
    IF p_enqueue THEN
        SELECT w.ticket INTO ticket FROM fencepost.waiters w WHERE w.grant_id = p_grant_id;
    END IF;
    SELECT l.* INTO v_lease FROM fencepost.leases l WHERE l.name = p_name;
    v_found := FOUND;
    IF v_found AND v_lease.released_at IS NULL
       AND (v_lease.expires_at IS NULL OR v_lease.expires_at > clock_timestamp())
       AND (v_lease.grant_id = p_grant_id OR NOT p_enqueue OR ticket IS NOT NULL) THEN
        IF v_lease.owner IS NOT NULL THEN
            SELECT o.expires_at INTO v_life FROM fencepost.owners o WHERE o.id = v_lease.owner;
        END IF;
        IF v_lease.owner IS NULL OR v_life > clock_timestamp() THEN
            token := v_lease.token;
            label := v_lease.label;
            remaining := least(v_life, v_lease.expires_at) - clock_timestamp();
            granted := v_lease.grant_id = p_grant_id AND v_lease.owner IS NOT DISTINCT FROM p_owner;
            IF granted THEN
                grant_id := p_grant_id;
                cap := v_lease.expires_at - clock_timestamp();
            ELSIF ticket IS NOT NULL THEN
                SELECT count(*) INTO ahead FROM fencepost.waiters w
         WHERE w.name = p_name AND (w.rank, w.ticket) < (p_rank, acquire.ticket);
            END IF;
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;

    -- 2. A row to lock, for the first grant of a name: one that is free, with token 0, which nobody
    -- is granted. The token of the grant is drawn below, like every other, after the row is locked.
    -- 3. Lock. A try takes what a grant needs, FOR UPDATE: it conflicts with the KEY SHARE of an open fenced
    -- write, so a write and a grant never overlap; a try, and who has a ticket, skips a row that somebody is
    -- at. Who retries or comes to queue waits a moment for others who are at the row, but not for fences.
    FOR v_round IN 1..3 LOOP
        IF NOT v_found THEN
            IF p_name IS NULL OR octet_length(p_name) NOT BETWEEN 1 AND 255 OR p_name ~ '[\x01-\x1f\x7f]'
               OR starts_with(p_name, 'fencepost:semaphore:') THEN
                RAISE EXCEPTION 'a lease name is 1 to 255 bytes without control characters' USING ERRCODE = 'LK005';
            END IF;
            INSERT INTO fencepost.leases (name, token, grant_id, label, granted_at, expires_at, released_at)
            VALUES (p_name, 0, gen_random_uuid(), 'nobody',
                    clock_timestamp(), 'epoch', clock_timestamp())
            ON CONFLICT ON CONSTRAINT leases_pkey DO NOTHING;
        END IF;
        IF p_retry OR (p_enqueue AND ticket IS NULL) THEN
            -- Not for long behind somebody's open transaction: 55P03, ask again.
            IF current_setting('lock_timeout') = '0' THEN
                PERFORM set_config('lock_timeout', '100ms', true);
            END IF;
            SELECT l.* INTO v_locked FROM fencepost.leases l WHERE l.name = p_name FOR NO KEY UPDATE;
        ELSE
            SELECT l.* INTO v_locked FROM fencepost.leases l WHERE l.name = p_name FOR UPDATE SKIP LOCKED;
        END IF;
        v_found := FOUND;
        IF v_found THEN
            v_lease := v_locked;
            EXIT;
        END IF;
        -- Somebody is at it; or it has just been pruned, and is made anew.
        EXIT WHEN EXISTS (SELECT FROM fencepost.leases l WHERE l.name = p_name);
    END LOOP;

    -- 4. Judge, in statements that start after the lock is held.
    IF p_owner IS NOT NULL THEN
        SELECT o.expires_at, o.label INTO v_own_life, v_own_label FROM fencepost.owners o WHERE o.id = p_owner;
        IF NOT FOUND OR v_own_life <= clock_timestamp() THEN
            RAISE EXCEPTION 'the owner that asks for lease "%" is dead', p_name USING ERRCODE = 'LK003';
        END IF;
    END IF;
    v_life := NULL;
    v_held := v_found AND v_lease.released_at IS NULL
              AND (v_lease.expires_at IS NULL OR v_lease.expires_at > clock_timestamp());
    IF v_held AND v_lease.grant_id = p_grant_id AND v_lease.owner IS NOT DISTINCT FROM p_owner THEN
        granted := true;
        token := v_lease.token;
        grant_id := p_grant_id;
        label := v_own_label;
        remaining := least(v_own_life, v_lease.expires_at) - clock_timestamp();
        cap := v_lease.expires_at - clock_timestamp();
        RETURN NEXT;
        RETURN;
    END IF;
    IF v_held AND v_lease.owner IS NOT NULL THEN
        SELECT o.expires_at INTO v_life FROM fencepost.owners o WHERE o.id = v_lease.owner;
        IF FOUND AND v_life > 'epoch' AND v_life <= clock_timestamp() THEN
            -- Expired and not yet marked. A heartbeat in flight holds the row: wait for it, judge
            -- again, and write the mark, or the heartbeat would succeed after this takeover.
            SELECT o.expires_at INTO v_life FROM fencepost.owners o WHERE o.id = v_lease.owner FOR NO KEY UPDATE;
            IF FOUND AND v_life <= clock_timestamp() THEN
                UPDATE fencepost.owners o SET expires_at = 'epoch' WHERE o.id = v_lease.owner;
            END IF;
        END IF;
        v_held := coalesce(v_life > clock_timestamp(), false);
    END IF;
    IF v_found AND NOT v_held AND (p_retry OR p_enqueue) THEN
        PERFORM FROM fencepost.leases l WHERE l.name = p_name FOR UPDATE SKIP LOCKED;
        v_found := FOUND;   -- no: a fenced write is open
    END IF;

    -- 5. Queue. Also to be granted next, if others wait: it goes to the head.
    IF p_enqueue AND ticket IS NULL
       AND (v_held OR NOT v_found OR EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = p_name)) THEN
        INSERT INTO fencepost.waiters AS w (name, rank, owner, grant_id, at_most, metadata)
        VALUES (p_name, coalesce(p_rank, 0), p_owner, p_grant_id, p_at_most, p_metadata)
        ON CONFLICT ON CONSTRAINT waiters_grant_id_key DO NOTHING
        RETURNING w.ticket INTO ticket;
    END IF;
    IF ticket IS NOT NULL THEN
        SELECT count(*) INTO ahead FROM fencepost.waiters w
         WHERE w.name = p_name AND (w.rank, w.ticket) < (p_rank, acquire.ticket);
    END IF;
    IF v_held OR NOT v_found THEN
        token := nullif(v_lease.token, 0);
        label := v_lease.label;
        remaining := CASE WHEN v_held THEN least(v_life, v_lease.expires_at) - clock_timestamp() ELSE '0' END;
        RETURN NEXT;
        RETURN;
    END IF;

    -- 6. Free, and ours to give: to the head of the queue, or to the caller. The token is drawn after the
    -- row is locked: drawn before, tokens go backwards.
    IF EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = p_name) THEN
        SELECT * INTO v_head FROM fencepost.hand_to_head(p_name);
        IF FOUND THEN
            granted := coalesce(v_head.grant_id = p_grant_id, false);
            token := coalesce(v_head.token, nullif(v_lease.token, 0));
            label := coalesce(v_head.label, v_lease.label);
            remaining := coalesce(v_head.remaining, '0');
            IF granted THEN
                grant_id := p_grant_id;
                cap := p_at_most;
                ticket := NULL;
                ahead := NULL;
            ELSE
                wake_channel := v_head.wake_channel;
                wake_payload := v_head.wake_payload;
            END IF;
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    -- A token is handed out only after its commit is on disk: raised, never lowered. (Queueing needs no disk.)
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    UPDATE fencepost.leases l
       SET token = nextval('fencepost.fencing_token'), grant_id = p_grant_id, owner = p_owner, label = v_own_label,
           granted_at = clock_timestamp(), expires_at = clock_timestamp() + p_at_most,
           released_at = NULL, metadata = p_metadata
     WHERE l.name = p_name
    RETURNING l.token, l.expires_at INTO v_lease.token, v_lease.expires_at;
    granted := true;
    token := v_lease.token;
    grant_id := p_grant_id;
    label := v_own_label;
    remaining := least(v_own_life, v_lease.expires_at) - clock_timestamp();
    cap := p_at_most;
    ticket := NULL;
    ahead := NULL;
    RETURN NEXT;
END $$;
REVOKE ALL ON FUNCTION fencepost.acquire(text, uuid, uuid, interval, jsonb, text, boolean, boolean, integer) FROM PUBLIC;

-- release(name, token, grant_id): released: this grant still held the lease, by a living owner; asked again, the
-- same answer.
-- Only this grant: a lease that somebody else holds by now is left alone. Grants it to the oldest living
-- ticket in the same statement, and says whom to wake. Never waits for an open fence (NO KEY UPDATE passes
-- its KEY SHARE): then it is free and cannot be granted yet, and waiting says that somebody wants it: see
-- hand_over. So it says if the head's life is not decided this moment. (Of a semaphore: a row more for each that was
-- granted permits.)
CREATE FUNCTION fencepost.release(p_name text, p_token bigint, p_grant_id uuid)
RETURNS TABLE (released boolean, waiting boolean, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.release needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    waiting := false;
    -- Freed whether its owner lives or not, since that may not be decided yet: by what is committed it may be
    -- dead while a heartbeat in flight lets it live on. Its life decides the answer alone, and is written down with
    -- it. (It may be judged in the statement that locks: if this waits for a takeover, either that commits and the
    -- pair is another one, or it does not and nobody was granted anything.)
    UPDATE fencepost.leases l
       SET released_at = clock_timestamp(),
           expires_at = CASE WHEN l.owner IS NULL OR EXISTS (SELECT FROM fencepost.owners o
                                                              WHERE o.id = l.owner AND o.expires_at > clock_timestamp())
                             THEN l.expires_at ELSE 'epoch' END
     WHERE l.name = p_name AND l.token = p_token AND l.grant_id = p_grant_id AND l.released_at IS NULL
    RETURNING l.expires_at IS NULL OR l.released_at < l.expires_at INTO released;
    IF NOT FOUND THEN
        IF starts_with(p_name, 'fencepost:semaphore:') THEN
            RETURN QUERY SELECT * FROM fencepost.permit_release(substr(p_name, 21), p_token, p_grant_id);
            RETURN;
        END IF;
        -- Somebody else's by now; or released before, and then the same answer as then.
        SELECT l.expires_at IS NULL OR l.released_at < l.expires_at INTO released FROM fencepost.leases l
         WHERE l.name = p_name AND l.token = p_token AND l.grant_id = p_grant_id AND l.released_at IS NOT NULL;
        released := coalesce(released, false);
        RETURN NEXT;
        RETURN;
    END IF;
    -- As hand_over does, which would cost this common case another call.
    IF EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = p_name) THEN
        PERFORM FROM fencepost.leases l WHERE l.name = p_name FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            SELECT h.grant_id IS NULL, h.wake_channel, h.wake_payload INTO waiting, wake_channel, wake_payload
              FROM fencepost.hand_to_head(p_name) h;
            waiting := coalesce(waiting, false);
        ELSE
            waiting := true;
        END IF;
    END IF;
    RETURN NEXT;
END $$;
REVOKE ALL ON FUNCTION fencepost.release(text, bigint, uuid) FROM PUBLIC;

-- owned(owner): the leases, tickets and claims (what) of an owner, so that its process can give back those it does
-- not know (a lost release, a lost answer, a failover): otherwise they would live as long as it beats.
CREATE FUNCTION fencepost.owned(p_owner uuid) RETURNS TABLE (what text, name text, token bigint, grant_id uuid)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
        SELECT 'lease', l.name, l.token, l.grant_id FROM fencepost.leases l
         WHERE l.owner = p_owner AND l.released_at IS NULL
        UNION ALL
        SELECT 'ticket', w.name, NULL, w.grant_id FROM fencepost.waiters w WHERE w.owner = p_owner
        UNION ALL
        SELECT DISTINCT 'permit', 'fencepost:semaphore:' || p.semaphore, p.token, p.grant_id FROM fencepost.permits p
         WHERE p.owner = p_owner AND p.released_at IS NULL
        UNION ALL
        SELECT 'claim', c.key, c.token, c.grant_id FROM fencepost.claims c
         WHERE c.owner = p_owner AND c.state = 'running';
END $$;
REVOKE ALL ON FUNCTION fencepost.owned(uuid) FROM PUBLIC;

-- revoke(name, token): for operators, granted to no application. Ends the hold of whoever has the lease, or
-- only of this token, at once: new fences of it are refused (one whose snapshot is older than this may still
-- pass, and is waited for), and the next grant, to the head of the queue, waits for the fences still open. The
-- holder is told by its next heartbeat. revoked: there was a grant to end, alive or not. (Of a semaphore: of whoever has
-- permits, and a row more for each that was granted some.) One in a transaction: it keeps what it locks.
CREATE FUNCTION fencepost.revoke(p_name text, p_token bigint DEFAULT NULL)
RETURNS TABLE (revoked boolean, waiting boolean, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_owner uuid;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.revoke needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF starts_with(p_name, 'fencepost:semaphore:') THEN
        RETURN QUERY SELECT * FROM fencepost.permit_revoke(substr(p_name, 21), p_token);
        RETURN;
    END IF;
    -- Its time ends with it, so that a later release of the holder is told that it had been lost.
    UPDATE fencepost.leases l SET released_at = v_now, expires_at = v_now
     WHERE l.name = p_name AND l.released_at IS NULL AND (p_token IS NULL OR l.token = p_token)
    RETURNING l.owner INTO v_owner;
    revoked := FOUND;
    waiting := false;
    IF revoked THEN
        UPDATE fencepost.owners o SET revocations = o.revocations + 1 WHERE o.id = v_owner;
        SELECT h.waiting, h.wake_channel, h.wake_payload INTO waiting, wake_channel, wake_payload
          FROM fencepost.hand_over(p_name) h;
    END IF;
    RETURN NEXT;
END $$;
REVOKE ALL ON FUNCTION fencepost.revoke(text, bigint) FROM PUBLIC;
