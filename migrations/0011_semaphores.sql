-- Semaphores: at most so many permits at once. A permit is a row with its grant, as a lease is, so it dies with its owner.
--
-- A grant of several permits is several rows with one pair (token, grant_id). A row (a *slot*) outlives its release and is
-- granted again. A counter would be smaller, and wrong: nobody could say which part of it belongs to the dead.
--
-- To release, revoke, fence, hand_over and withdraw, and in waiters and owned, a semaphore is known as
-- 'fencepost:semaphore:' || name.
--
-- Lock order: the semaphore's row, then its slots (skipping locked ones), then owners by id. Whoever grants or
-- releases holds the semaphore's row, so slots of one semaphore change one transaction at a time; an open fence holds
-- only its own slots.

CREATE TABLE fencepost.semaphores (
    name    text    PRIMARY KEY,
    permits integer NOT NULL CHECK (permits BETWEEN 1 AND 100000)
) WITH (fillfactor = 50);
REVOKE ALL ON fencepost.semaphores FROM PUBLIC;

CREATE TABLE fencepost.permits (
    semaphore   text        NOT NULL,
    slot        integer     NOT NULL,
    token       bigint      NOT NULL,
    grant_id    uuid        NOT NULL,
    owner       uuid        NOT NULL,
    label       text        NOT NULL,
    granted_at  timestamptz NOT NULL,
    released_at timestamptz,
    -- With released_at: its owner was alive then.
    was_held    boolean,
    PRIMARY KEY (semaphore, slot)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
-- No other index: every grant of a slot and every release stays a HOT update.
REVOKE ALL ON fencepost.permits FROM PUBLIC;

-- permit_take(semaphore, count, …): internal; the semaphore's row is locked. Grants so many slots to one pair, or none:
-- then token is null, and unsettled says that more may be free in a moment, since an open fenced write holds a free slot
-- or the heartbeat of an expired owner is in flight. (It waits for neither: with other owners' rows locked already it
-- could deadlock.)
--
-- What may be in use is a row, and there are never more rows than permits: so whoever finds a free row or may add one
-- may have it. After the limit has shrunk there may be more, until the free ones are deleted here.
CREATE FUNCTION fencepost.permit_take(
    p_semaphore text, p_count integer, p_owner uuid, p_grant_id uuid, p_label text,
    OUT token bigint, OUT unsettled boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_owner   uuid;
    v_life    timestamptz;
    v_permits integer;
    v_rows    integer;
    v_free    integer;
    v_top     integer;
    v_slots   integer[];
BEGIN
    unsettled := false;
    -- Expired and not yet marked dead: judge again under the lock, and write the mark, or a heartbeat in flight would
    -- succeed after this.
    FOR v_owner IN
        SELECT DISTINCT o.id FROM fencepost.permits p JOIN fencepost.owners o ON o.id = p.owner
         WHERE p.semaphore = p_semaphore AND p.released_at IS NULL
           AND o.expires_at > 'epoch' AND o.expires_at <= clock_timestamp()
    LOOP
        SELECT o.expires_at INTO v_life FROM fencepost.owners o WHERE o.id = v_owner FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            unsettled := true;
        ELSIF v_life <= clock_timestamp() THEN
            UPDATE fencepost.owners o SET expires_at = 'epoch' WHERE o.id = v_owner;
        END IF;
    END LOOP;
    SELECT s.permits INTO v_permits FROM fencepost.semaphores s WHERE s.name = p_semaphore;
    -- Only the mark counts from here on. A free slot under an open fence is skipped, and stays a row.
    SELECT count(*), count(*) FILTER (WHERE p.released_at IS NOT NULL OR o.id IS NULL OR o.expires_at = 'epoch'),
           coalesce(max(p.slot), 0)
      INTO v_rows, v_free, v_top
      FROM fencepost.permits p LEFT JOIN fencepost.owners o ON o.id = p.owner
     WHERE p.semaphore = p_semaphore;
    IF v_rows > v_permits THEN
        DELETE FROM fencepost.permits d WHERE d.semaphore = p_semaphore AND d.slot IN (
            SELECT p.slot FROM fencepost.permits p
             WHERE p.semaphore = p_semaphore
               AND (p.released_at IS NOT NULL
                    OR NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = p.owner AND o.expires_at > 'epoch'))
             ORDER BY p.slot DESC LIMIT v_rows - v_permits FOR UPDATE OF p SKIP LOCKED);
        SELECT count(*) INTO v_rows FROM fencepost.permits p WHERE p.semaphore = p_semaphore;
    END IF;
    SELECT coalesce(array_agg(f.slot), '{}') INTO v_slots FROM (
        SELECT p.slot FROM fencepost.permits p
         WHERE p.semaphore = p_semaphore AND v_rows <= v_permits
           AND (p.released_at IS NOT NULL
                OR NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = p.owner AND o.expires_at > 'epoch'))
         ORDER BY p.slot LIMIT p_count FOR UPDATE OF p SKIP LOCKED) f;
    IF v_rows + p_count - cardinality(v_slots) > v_permits THEN
        unsettled := unsettled OR v_free > cardinality(v_slots);
        RETURN;
    END IF;
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    token := nextval('fencepost.fencing_token');
    UPDATE fencepost.permits p
       SET token = permit_take.token, grant_id = p_grant_id, owner = p_owner, label = p_label,
           granted_at = clock_timestamp(), released_at = NULL, was_held = NULL
     WHERE p.semaphore = p_semaphore AND p.slot = ANY (v_slots);
    INSERT INTO fencepost.permits (semaphore, slot, token, grant_id, owner, label, granted_at)
    SELECT p_semaphore, v_top + n, permit_take.token, p_grant_id, p_owner, p_label, clock_timestamp()
      FROM generate_series(1, p_count - cardinality(v_slots)) n;
END $$;
REVOKE ALL ON FUNCTION fencepost.permit_take(text, integer, uuid, uuid, text) FROM PUBLIC;

-- permits_to_heads(semaphore): internal; the semaphore's row is locked. Grants what is free to the oldest living
-- tickets, strictly in order: a head that asks for more than is free is waited for, so that it is served at all. A row
-- for each grant. A row without a grant: not decided, ask again soon (hand_to_head says why), or a fenced write is open.
CREATE FUNCTION fencepost.permits_to_heads(p_semaphore text)
RETURNS TABLE (grant_id uuid, token bigint, remaining interval, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_name  text := 'fencepost:semaphore:' || p_semaphore;
    v_head  fencepost.waiters%ROWTYPE;
    v_life  timestamptz;
    v_label text;
    v_taken record;
BEGIN
    LOOP
        grant_id := NULL;
        token := NULL;
        remaining := NULL;
        wake_channel := NULL;
        wake_payload := NULL;
        SELECT w.* INTO v_head FROM fencepost.waiters w WHERE w.name = v_name
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
        IF v_life > clock_timestamp() THEN
            SELECT * INTO v_taken
              FROM fencepost.permit_take(p_semaphore, v_head.permits, v_head.owner, v_head.grant_id, v_label);
            IF v_taken.token IS NULL THEN
                IF v_taken.unsettled THEN
                    RETURN NEXT;
                END IF;
                RETURN;
            END IF;
            token := v_taken.token;
        END IF;
        DELETE FROM fencepost.waiters w
         WHERE w.name = v_name AND w.rank = v_head.rank AND w.ticket = v_head.ticket;
        CONTINUE WHEN token IS NULL;
        grant_id := v_head.grant_id;
        remaining := v_life - clock_timestamp();
        wake_channel := fencepost.wake_channel(v_head.owner);
        wake_payload := v_head.ticket || ' ' || token || ' '
            || encode(sha256(uuid_send(v_head.grant_id) || int8send(token)), 'hex');
        RETURN NEXT;
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION fencepost.permits_to_heads(text) FROM PUBLIC;

-- permit_acquire(semaphore, limit, count, owner, grant_id, …): so many permits for this grant id, all or none, or who
-- holds them (one of the holders: the one whose life ends first unless it beats). As acquire answers; further rows say
-- whom else to wake. LK007: the semaphore has another limit.
CREATE FUNCTION fencepost.permit_acquire(
    p_semaphore text,
    p_limit     integer,
    p_count     integer,
    p_owner     uuid,
    p_grant_id  uuid    DEFAULT pg_catalog.gen_random_uuid(),
    p_enqueue   boolean DEFAULT false)
RETURNS TABLE (granted boolean, token bigint, grant_id uuid, label text, remaining interval, cap interval,
               ticket bigint, ahead bigint, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_name      text := 'fencepost:semaphore:' || p_semaphore;
    v_limit     integer;
    v_found     boolean;
    v_held      bigint;
    v_taken     record;
    v_own_life  timestamptz;
    v_own_label text;
    v_head      record;
    v_wakes     text[] := '{}';
    v_unsettled boolean := false;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.permit_acquire needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_semaphore IS NULL OR octet_length(v_name) > 255 OR p_semaphore = '' OR p_semaphore ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a semaphore''s name is 1 to 235 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 100000 THEN
        RAISE EXCEPTION 'a semaphore has 1 to 100000 permits, not %', p_limit USING ERRCODE = 'LK005';
    END IF;
    IF p_count IS NULL OR p_count NOT BETWEEN 1 AND p_limit THEN
        RAISE EXCEPTION 'of % permits 1 to all are acquired at once, not %', p_limit, p_count USING ERRCODE = 'LK005';
    END IF;
    IF p_owner IS NULL OR p_grant_id IS NULL THEN
        RAISE EXCEPTION 'a permit needs an owner and a grant id' USING ERRCODE = 'LK005';
    END IF;
    granted := false;

    -- 1. Look, without a lock: a refused try, and a waiter that asks again, cost neither a transaction id nor WAL.
    -- The ticket first: if it is gone by now, the grant is seen below.
    IF p_enqueue THEN
        SELECT w.ticket INTO ticket FROM fencepost.waiters w WHERE w.grant_id = p_grant_id;
    END IF;
    SELECT s.permits INTO v_limit FROM fencepost.semaphores s WHERE s.name = p_semaphore;
    v_found := FOUND;
    IF v_found AND (ticket IS NOT NULL OR NOT p_enqueue) THEN
        SELECT count(*), min(o.expires_at) - clock_timestamp(),
               (array_agg(p.token ORDER BY o.expires_at))[1], (array_agg(p.label ORDER BY o.expires_at))[1]
          INTO v_held, remaining, token, label
          FROM fencepost.permits p JOIN fencepost.owners o ON o.id = p.owner
         WHERE p.semaphore = p_semaphore AND p.released_at IS NULL AND o.expires_at > clock_timestamp();
        IF v_held + p_count > v_limit AND (p_limit = v_limit OR ticket IS NOT NULL)
           AND NOT EXISTS (SELECT FROM fencepost.permits p
                            WHERE p.semaphore = p_semaphore AND p.grant_id = p_grant_id AND p.released_at IS NULL) THEN
            IF ticket IS NOT NULL THEN
                SELECT count(*) INTO ahead FROM fencepost.waiters w WHERE w.name = v_name AND w.ticket < permit_acquire.ticket;
            END IF;
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;

    -- 2. A row to lock. 3. Lock it: everybody is at it for a moment only, so this waits; not for long behind
    -- somebody's open transaction: 55P03, ask again.
    IF NOT v_found THEN
        INSERT INTO fencepost.semaphores (name, permits) VALUES (p_semaphore, p_limit)
        ON CONFLICT ON CONSTRAINT semaphores_pkey DO NOTHING;
    END IF;
    IF current_setting('lock_timeout') = '0' THEN
        PERFORM set_config('lock_timeout', '100ms', true);
    END IF;
    SELECT s.permits INTO v_limit FROM fencepost.semaphores s WHERE s.name = p_semaphore FOR NO KEY UPDATE;

    -- 4. Judge, in statements that start after the lock is held.
    SELECT o.expires_at, o.label INTO v_own_life, v_own_label FROM fencepost.owners o WHERE o.id = p_owner;
    IF NOT FOUND OR v_own_life <= clock_timestamp() THEN
        RAISE EXCEPTION 'the owner that asks for semaphore "%" is dead', p_semaphore USING ERRCODE = 'LK003';
    END IF;
    SELECT p.token INTO token FROM fencepost.permits p
     WHERE p.semaphore = p_semaphore AND p.grant_id = p_grant_id AND p.owner = p_owner AND p.released_at IS NULL LIMIT 1;
    IF FOUND THEN
        granted := true;
        grant_id := p_grant_id;
        label := v_own_label;
        remaining := v_own_life - clock_timestamp();
        ticket := NULL;
        RETURN NEXT;
        RETURN;
    END IF;
    IF ticket IS NULL AND p_limit <> v_limit THEN
        RAISE EXCEPTION 'semaphore "%" has % permits, not %', p_semaphore, v_limit, p_limit
              USING ERRCODE = 'LK007',
                    DETAIL = jsonb_build_object('name', p_semaphore, 'permits', v_limit, 'asked', p_limit),
                    HINT = 'The limit is changed by semaphore_resize.';
    END IF;

    -- 5. What is free goes to those who wait, in order, whoever asks; one who comes to wait is the last of them.
    IF p_enqueue AND ticket IS NULL THEN
        INSERT INTO fencepost.waiters AS w (name, owner, grant_id, permits)
        VALUES (v_name, p_owner, p_grant_id, p_count)
        ON CONFLICT ON CONSTRAINT waiters_grant_id_key DO NOTHING
        RETURNING w.ticket INTO ticket;
    END IF;
    IF EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = v_name) THEN
        FOR v_head IN SELECT * FROM fencepost.permits_to_heads(p_semaphore) LOOP
            IF v_head.grant_id = p_grant_id THEN
                granted := true;
                token := v_head.token;
                remaining := v_head.remaining;
            ELSIF v_head.grant_id IS NOT NULL THEN
                v_wakes := v_wakes || array[v_head.wake_channel, v_head.wake_payload];
            ELSE
                v_unsettled := true;
            END IF;
        END LOOP;
    END IF;
    IF NOT granted AND NOT p_enqueue AND NOT EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = v_name) THEN
        SELECT * INTO v_taken FROM fencepost.permit_take(p_semaphore, p_count, p_owner, p_grant_id, v_own_label);
        granted := v_taken.token IS NOT NULL;
        token := v_taken.token;
        remaining := v_own_life - clock_timestamp();
        v_unsettled := v_taken.unsettled;
    END IF;
    IF granted THEN
        grant_id := p_grant_id;
        label := v_own_label;
        ticket := NULL;
    ELSE
        SELECT min(o.expires_at) - clock_timestamp(),
               (array_agg(p.token ORDER BY o.expires_at))[1], (array_agg(p.label ORDER BY o.expires_at))[1]
          INTO remaining, token, label
          FROM fencepost.permits p JOIN fencepost.owners o ON o.id = p.owner
         WHERE p.semaphore = p_semaphore AND p.released_at IS NULL AND o.expires_at > 'epoch';
        IF v_unsettled OR remaining IS NULL THEN
            remaining := '0';
        END IF;
        IF ticket IS NOT NULL THEN
            SELECT count(*) INTO ahead FROM fencepost.waiters w WHERE w.name = v_name AND w.ticket < permit_acquire.ticket;
        END IF;
    END IF;
    RETURN NEXT;
    granted := false;
    FOR v_at IN 1..cardinality(v_wakes) / 2 LOOP
        wake_channel := v_wakes[2 * v_at - 1];
        wake_payload := v_wakes[2 * v_at];
        RETURN NEXT;
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION fencepost.permit_acquire(text, integer, integer, uuid, uuid, boolean) FROM PUBLIC;

-- permit_hand_over(semaphore): internal; as hand_over, for a semaphore: a row for each that was granted permits.
CREATE FUNCTION fencepost.permit_hand_over(p_semaphore text)
RETURNS TABLE (waiting boolean, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = 'fencepost:semaphore:' || p_semaphore) THEN
        PERFORM FROM fencepost.semaphores s WHERE s.name = p_semaphore FOR NO KEY UPDATE;
        RETURN QUERY SELECT h.grant_id IS NULL, h.wake_channel, h.wake_payload
                       FROM fencepost.permits_to_heads(p_semaphore) h;
    END IF;
END $$;
REVOKE ALL ON FUNCTION fencepost.permit_hand_over(text) FROM PUBLIC;

-- permit_release(semaphore, token, grant_id): internal; release calls it. Never waits for an open fence.
CREATE FUNCTION fencepost.permit_release(p_semaphore text, p_token bigint, p_grant_id uuid)
RETURNS TABLE (released boolean, waiting boolean, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_freed bigint;
BEGIN
    -- The semaphore first: whoever comes to queue meanwhile either sees these free, or is seen below.
    PERFORM FROM fencepost.semaphores s WHERE s.name = p_semaphore FOR NO KEY UPDATE;
    UPDATE fencepost.permits p
       SET released_at = clock_timestamp(),
           was_held = EXISTS (SELECT FROM fencepost.owners o WHERE o.id = p.owner AND o.expires_at > clock_timestamp())
     WHERE p.semaphore = p_semaphore AND p.token = p_token AND p.grant_id = p_grant_id AND p.released_at IS NULL;
    GET DIAGNOSTICS v_freed = ROW_COUNT;
    SELECT coalesce(bool_and(p.was_held), false) INTO released FROM fencepost.permits p
     WHERE p.semaphore = p_semaphore AND p.token = p_token AND p.grant_id = p_grant_id;
    waiting := false;
    RETURN NEXT;
    IF v_freed > 0 THEN
        RETURN QUERY SELECT permit_release.released, h.waiting, h.wake_channel, h.wake_payload
                       FROM fencepost.permit_hand_over(p_semaphore) h;
    END IF;
END $$;
REVOKE ALL ON FUNCTION fencepost.permit_release(text, bigint, uuid) FROM PUBLIC;

-- permit_revoke(semaphore, token): internal; revoke calls it. Never waits for an open fence: that ends before another
-- has its slots.
CREATE FUNCTION fencepost.permit_revoke(p_semaphore text, p_token bigint)
RETURNS TABLE (revoked boolean, waiting boolean, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_owners uuid[];
BEGIN
    PERFORM FROM fencepost.semaphores s WHERE s.name = p_semaphore FOR NO KEY UPDATE;
    -- Not held at its end, so that a later release of the holder is told that it had been lost.
    WITH ended AS (
        UPDATE fencepost.permits p SET released_at = clock_timestamp(), was_held = false
         WHERE p.semaphore = p_semaphore AND p.released_at IS NULL AND (p_token IS NULL OR p.token = p_token)
        RETURNING p.owner)
    SELECT array_agg(DISTINCT e.owner) INTO v_owners FROM ended e;
    revoked := v_owners IS NOT NULL;
    waiting := false;
    RETURN NEXT;
    IF revoked THEN
        PERFORM FROM fencepost.owners o WHERE o.id = ANY (v_owners) ORDER BY o.id FOR NO KEY UPDATE;
        UPDATE fencepost.owners o SET revocations = o.revocations + 1 WHERE o.id = ANY (v_owners);
        RETURN QUERY SELECT permit_revoke.revoked, h.waiting, h.wake_channel, h.wake_payload
                       FROM fencepost.permit_hand_over(p_semaphore) h;
    END IF;
END $$;
REVOKE ALL ON FUNCTION fencepost.permit_revoke(text, bigint) FROM PUBLIC;

-- semaphore_resize(semaphore, permits): the limit from now on. Nobody is evicted: if more are held, nobody is granted any
-- until they are fewer. A row for each that was granted permits by it. (Whoever asks with the old limit is told: LK007.)
CREATE FUNCTION fencepost.semaphore_resize(p_semaphore text, p_permits integer)
RETURNS TABLE (waiting boolean, wake_channel text, wake_payload text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.semaphore_resize needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_semaphore IS NULL OR octet_length(p_semaphore) NOT BETWEEN 1 AND 235 OR p_semaphore ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a semaphore''s name is 1 to 235 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    IF p_permits IS NULL OR p_permits NOT BETWEEN 1 AND 100000 THEN
        RAISE EXCEPTION 'a semaphore has 1 to 100000 permits, not %', p_permits USING ERRCODE = 'LK005';
    END IF;
    INSERT INTO fencepost.semaphores AS s (name, permits) VALUES (p_semaphore, p_permits)
    ON CONFLICT ON CONSTRAINT semaphores_pkey DO UPDATE SET permits = EXCLUDED.permits;
    RETURN QUERY SELECT h.waiting, h.wake_channel, h.wake_payload FROM fencepost.permit_hand_over(p_semaphore) h;
END $$;
REVOKE ALL ON FUNCTION fencepost.semaphore_resize(text, integer) FROM PUBLIC;

-- permit_fence(semaphore, token, grant_id): internal; fence calls it when there is no such lease. As fence, against the
-- slots of the grant: none of them is granted anew until the transaction ends. Returns the ttl.
CREATE FUNCTION fencepost.permit_fence(p_semaphore text, p_token bigint, p_grant_id uuid) RETURNS interval
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_name     text := 'fencepost:semaphore:' || p_semaphore;
    v_strict   boolean := current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
    v_slot     record;
    v_owner    uuid;
    v_released boolean := false;
    v_life     timestamptz;
    v_ttl      interval;
    v_why      text;
BEGIN
    FOR v_slot IN
        SELECT p.owner, p.released_at FROM fencepost.permits p
         WHERE p.semaphore = p_semaphore AND p.token = p_token AND p.grant_id = p_grant_id
         ORDER BY p.slot FOR KEY SHARE
    LOOP
        v_owner := v_slot.owner;
        v_released := v_released OR v_slot.released_at IS NOT NULL;
    END LOOP;
    IF v_owner IS NULL THEN
        IF v_strict THEN
            RAISE EXCEPTION 'could not serialize access: no permit of "%" with token % is in the snapshot', p_semaphore, p_token
                  USING ERRCODE = 'serialization_failure', HINT = 'It may have been granted since. Roll back and look again.';
        END IF;
        RAISE EXCEPTION 'stale fence: no permit of "%" has token % any more', p_semaphore, p_token
              USING ERRCODE = 'LK001',
                    DETAIL = jsonb_build_object('name', v_name, 'token', p_token, 'current', NULL),
                    HINT = 'Roll back: others have its slots, or it was never granted.';
    END IF;
    IF v_released THEN
        v_why := 'released';
    ELSE
        SELECT o.expires_at, o.ttl INTO v_life, v_ttl FROM fencepost.owners o WHERE o.id = v_owner;
        IF v_life IS NULL OR v_life <= clock_timestamp() THEN
            IF v_life > 'epoch' AND v_strict THEN
                -- As in fence: the snapshot may be older than the last heartbeat.
                BEGIN
                    PERFORM FROM fencepost.owners o WHERE o.id = v_owner FOR SHARE NOWAIT;
                EXCEPTION WHEN lock_not_available THEN
                    RAISE EXCEPTION 'could not serialize access: the owner of a permit of "%" is beating', p_semaphore
                          USING ERRCODE = 'serialization_failure';
                END;
            END IF;
            v_why := 'expired';
        END IF;
    END IF;
    IF v_why IS NOT NULL THEN
        RAISE EXCEPTION 'lost: the permit of "%" with token % has %', p_semaphore, p_token,
                        CASE v_why WHEN 'released' THEN 'been released' ELSE v_why END
              USING ERRCODE = 'LK002',
                    DETAIL = jsonb_build_object('name', v_name, 'token', p_token, 'why', v_why),
                    HINT = 'Roll back: the next holder may already be at work.';
    END IF;
    RETURN v_ttl;
END $$;
REVOKE ALL ON FUNCTION fencepost.permit_fence(text, bigint, uuid) FROM PUBLIC;
