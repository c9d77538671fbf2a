-- Claims: do it once. A key, and what has become of it.
--
--                     begin, claim_next               complete
--         ready ──────────────────────────▶ running ───────────▶ done, with its result
--           ▲                                  │
--           │      fail                        │
--           │      given back                  │
--           └──────the owner's death───────────┴──too often────▶ poison
--
-- An attempt is a grant (token, grant_id) of the key to an owner, and lives as long as that owner: how long the work
-- takes is nobody's business. What ends it carries the pair, and runs in the transaction of the effect.

CREATE TABLE fencepost.claims (
    key          text        COLLATE "C" PRIMARY KEY,
    kind         text        COLLATE "C", -- null: no job; begun by its key only
    state        text        NOT NULL CHECK (state IN ('ready', 'running', 'done', 'poison')),
    token        bigint      NOT NULL DEFAULT 0,
    grant_id     uuid,
    owner        uuid,
    label        text,
    fingerprint  text,       -- of the request that the key stands for
    payload      jsonb,
    result       jsonb,
    error        text,       -- of the last failure
    -- The last attempt ended without a word (or runs, after such a one): it may have had effects.
    unclear      boolean     NOT NULL DEFAULT false,
    attempts     integer     NOT NULL DEFAULT 0,
    failures     integer     NOT NULL DEFAULT 0,
    crashes      integer     NOT NULL DEFAULT 0,
    max_failures integer     NOT NULL DEFAULT 10,
    max_crashes  integer     NOT NULL DEFAULT 3,
    due_at       timestamptz NOT NULL,
    started_at   timestamptz,
    ended_at     timestamptz,
    CHECK (state <> 'running' OR (owner IS NOT NULL AND grant_id IS NOT NULL AND token > 0))
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX claims_ready ON fencepost.claims (kind, due_at, key) WHERE state = 'ready';
CREATE INDEX claims_running ON fencepost.claims (kind, owner) WHERE state = 'running';
REVOKE ALL ON fencepost.claims FROM PUBLIC;

-- once(key): true for exactly one caller whose transaction commits. Joins the caller's transaction; another caller
-- waits until that has ended. In autocommit it is done by being called.
CREATE FUNCTION fencepost.once(p_key text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_key IS NULL OR octet_length(p_key) NOT BETWEEN 1 AND 255 OR p_key ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a claim''s key is 1 to 255 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    INSERT INTO fencepost.claims (key, state, due_at, ended_at)
    VALUES (p_key, 'done', clock_timestamp(), clock_timestamp())
    ON CONFLICT ON CONSTRAINT claims_pkey DO NOTHING;
    RETURN FOUND;
END $$;
REVOKE ALL ON FUNCTION fencepost.once(text) FROM PUBLIC;

-- once_each(keys): the same for many keys in one statement; returns those that are the caller's. They are claimed in
-- one order, so that callers with the same keys wait for each other and never deadlock.
CREATE FUNCTION fencepost.once_each(p_keys text[]) RETURNS TABLE (key text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_keys IS NULL OR EXISTS (
        SELECT FROM unnest(p_keys) k
         WHERE k IS NULL OR octet_length(k) NOT BETWEEN 1 AND 255 OR k ~ '[\x01-\x1f\x7f]') THEN
        RAISE EXCEPTION 'a claim''s key is 1 to 255 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    RETURN QUERY
        INSERT INTO fencepost.claims AS c (key, state, due_at, ended_at)
        SELECT k.key, 'done', clock_timestamp(), clock_timestamp()
          FROM (SELECT DISTINCT u.key COLLATE "C" AS key FROM unnest(p_keys) u (key) ORDER BY 1) k
        ON CONFLICT ON CONSTRAINT claims_pkey DO NOTHING
        RETURNING c.key;
END $$;
REVOKE ALL ON FUNCTION fencepost.once_each(text[]) FROM PUBLIC;

-- claim_enqueue(key, kind, …): a job for claim_next, with the caller's transaction. False: there is such a claim.
CREATE FUNCTION fencepost.claim_enqueue(
    p_key          text,
    p_kind         text,
    p_payload      jsonb    DEFAULT NULL,
    p_delay        interval DEFAULT '0',
    p_fingerprint  text     DEFAULT NULL,
    p_max_failures integer  DEFAULT 10,
    p_max_crashes  integer  DEFAULT 3)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_kind IS NULL THEN
        RAISE EXCEPTION 'a job has a kind' USING ERRCODE = 'LK005';
    END IF;
    IF p_delay IS NULL OR p_delay < '0' OR p_delay > interval '366 days' THEN
        RAISE EXCEPTION 'a delay is 0 to 366 days, not %', p_delay USING ERRCODE = 'LK005';
    END IF;
    PERFORM fencepost.claim_valid(p_key, p_kind, p_payload, p_fingerprint, p_max_failures, p_max_crashes);
    INSERT INTO fencepost.claims (key, kind, state, payload, fingerprint, max_failures, max_crashes, due_at)
    VALUES (p_key, p_kind, 'ready', p_payload, p_fingerprint, p_max_failures, p_max_crashes,
            clock_timestamp() + p_delay)
    ON CONFLICT ON CONSTRAINT claims_pkey DO NOTHING;
    RETURN FOUND;
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_enqueue(text, text, jsonb, interval, text, integer, integer) FROM PUBLIC;

-- claim_valid(…): raises LK005 for what no claim may be.
CREATE FUNCTION fencepost.claim_valid(
    p_key text, p_kind text, p_payload jsonb, p_fingerprint text, p_max_failures integer, p_max_crashes integer)
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_key IS NULL OR octet_length(p_key) NOT BETWEEN 1 AND 255 OR p_key ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a claim''s key is 1 to 255 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    IF octet_length(p_kind) NOT BETWEEN 1 AND 255 OR p_kind ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a claim''s kind is 1 to 255 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    IF octet_length(p_fingerprint) NOT BETWEEN 1 AND 255 THEN
        RAISE EXCEPTION 'a fingerprint is 1 to 255 bytes' USING ERRCODE = 'LK005';
    END IF;
    IF pg_column_size(p_payload) > 1048576 THEN
        RAISE EXCEPTION 'a payload is at most 1 MB as jsonb, not % bytes', pg_column_size(p_payload) USING ERRCODE = 'LK005';
    END IF;
    IF p_max_failures IS NULL OR p_max_failures < 1 OR p_max_crashes IS NULL OR p_max_crashes < 1 THEN
        RAISE EXCEPTION 'a claim may fail and crash once at least' USING ERRCODE = 'LK005';
    END IF;
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_valid(text, text, jsonb, text, integer, integer) FROM PUBLIC;

-- claim_begin(key, owner, grant_id, …): an attempt, or why there is none.
--
--   fresh        token; nobody is at it, and whoever was before has said how it ended
--   recovered    token; the attempt before (previous, label, since) ended without a word: it may have had effects
--   replay       done: its result
--   in_progress  label, since, remaining of whoever is at it; remaining 0: it is changing hands this moment, or its
--                owner is dead and a transaction of it is still open
--   mismatch     the key stands for a request with another fingerprint
--   poison       it has failed or crashed too often: failures, crashes, the last error
--
-- The policy and the payload count where the key is new. p_retry: an earlier call with this grant id may be under way;
-- wait for it and answer as it did.
CREATE FUNCTION fencepost.claim_begin(
    p_key          text,
    p_owner        uuid,
    p_grant_id     uuid,
    p_fingerprint  text    DEFAULT NULL,
    p_kind         text    DEFAULT NULL,
    p_payload      jsonb   DEFAULT NULL,
    p_max_failures integer DEFAULT 10,
    p_max_crashes  integer DEFAULT 3,
    p_retry        boolean DEFAULT false)
RETURNS TABLE (outcome text, token bigint, previous bigint, label text, since timestamptz, remaining interval,
               attempts integer, failures integer, crashes integer, error text, payload jsonb, result jsonb)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_claim     fencepost.claims%ROWTYPE;
    v_locked    fencepost.claims%ROWTYPE;
    v_found     boolean;
    v_ours      boolean := false;  -- the row is locked
    v_life      timestamptz;       -- until when the owner of the running attempt lives
    v_own_life  timestamptz;
    v_own_label text;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.claim_begin needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_owner IS NULL OR p_grant_id IS NULL THEN
        RAISE EXCEPTION 'an attempt has an owner and a grant id' USING ERRCODE = 'LK005';
    END IF;

    -- 1. Look, without a lock: what is done, or running under a living owner, is answered without a byte of WAL.
    SELECT c.* INTO v_claim FROM fencepost.claims c WHERE c.key = p_key;
    v_found := FOUND;
    IF v_found AND v_claim.state = 'running' THEN
        SELECT o.expires_at INTO v_life FROM fencepost.owners o WHERE o.id = v_claim.owner;
    END IF;

    IF NOT v_found OR v_claim.state = 'ready'
       OR (v_claim.state = 'running' AND coalesce(v_life <= clock_timestamp(), true)) THEN
        IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
            PERFORM set_config('synchronous_commit', 'on', true);
        END IF;
        -- Asked again, not for long behind somebody's open transaction: 55P03, ask again.
        IF p_retry AND current_setting('lock_timeout') = '0' THEN
            PERFORM set_config('lock_timeout', '100ms', true);
        END IF;
        -- 2. A new row, which runs from the start, or 3. lock the row that is there, as a takeover does: it conflicts
        -- with what an open complete, fail or fence holds, so the end of one attempt and the begin of the next never
        -- overlap.
        FOR v_round IN 1..3 LOOP
            IF NOT v_found THEN
                PERFORM fencepost.claim_valid(p_key, p_kind, p_payload, p_fingerprint, p_max_failures, p_max_crashes);
                INSERT INTO fencepost.claims (key, kind, state, token, grant_id, owner, payload, fingerprint,
                                              attempts, max_failures, max_crashes, due_at, started_at)
                VALUES (p_key, p_kind, 'running', 1, p_grant_id, p_owner, p_payload, p_fingerprint,
                        1, p_max_failures, p_max_crashes, clock_timestamp(), clock_timestamp())
                ON CONFLICT ON CONSTRAINT claims_pkey DO NOTHING;
                IF FOUND THEN
                    -- The token is drawn now that the row is ours: before, somebody may begin with a larger one,
                    -- complete, and be pruned. So are owner and time: this may have waited for somebody.
                    UPDATE fencepost.claims c
                       SET token = nextval('fencepost.fencing_token'), label = o.label,
                           due_at = clock_timestamp(), started_at = clock_timestamp()
                      FROM fencepost.owners o
                     WHERE c.key = p_key AND o.id = p_owner AND o.expires_at > clock_timestamp()
                    RETURNING c.token, c.attempts, c.failures, c.crashes, c.payload
                         INTO token, attempts, failures, crashes, payload;
                    IF NOT FOUND THEN
                        RAISE EXCEPTION 'the owner that begins claim "%" is dead', p_key USING ERRCODE = 'LK003';
                    END IF;
                    outcome := 'fresh';
                    RETURN NEXT;
                    RETURN;
                END IF;
            END IF;
            IF p_retry THEN
                SELECT c.* INTO v_locked FROM fencepost.claims c WHERE c.key = p_key FOR UPDATE;
            ELSE
                SELECT c.* INTO v_locked FROM fencepost.claims c WHERE c.key = p_key FOR UPDATE SKIP LOCKED;
            END IF;
            v_ours := FOUND;
            IF v_ours THEN
                v_claim := v_locked;
                v_found := true;
                EXIT;
            END IF;
            -- Somebody is at it; or it has just been pruned, and is made anew.
            SELECT c.* INTO v_claim FROM fencepost.claims c WHERE c.key = p_key;
            v_found := FOUND;
            EXIT WHEN v_found;
        END LOOP;
        -- 4. Judge, in statements that start after the lock is held.
        SELECT o.expires_at, o.label INTO v_own_life, v_own_label FROM fencepost.owners o WHERE o.id = p_owner;
        IF NOT FOUND OR v_own_life <= clock_timestamp() THEN
            RAISE EXCEPTION 'the owner that begins claim "%" is dead', p_key USING ERRCODE = 'LK003';
        END IF;
        v_life := NULL;
        IF v_claim.state = 'running' THEN
            SELECT o.expires_at INTO v_life FROM fencepost.owners o WHERE o.id = v_claim.owner;
            IF v_ours AND v_life > 'epoch' AND v_life <= clock_timestamp() THEN
                -- Expired and not yet marked: wait for a heartbeat in flight, judge again, and write the mark.
                SELECT o.expires_at INTO v_life FROM fencepost.owners o WHERE o.id = v_claim.owner FOR NO KEY UPDATE;
                IF FOUND AND v_life <= clock_timestamp() THEN
                    UPDATE fencepost.owners o SET expires_at = 'epoch' WHERE o.id = v_claim.owner;
                END IF;
            END IF;
        END IF;
    END IF;

    attempts := v_claim.attempts;
    failures := v_claim.failures;
    crashes := v_claim.crashes;
    error := v_claim.error;
    payload := v_claim.payload;
    label := v_claim.label;
    since := v_claim.started_at;
    IF v_found AND v_claim.fingerprint IS DISTINCT FROM p_fingerprint AND p_fingerprint IS NOT NULL THEN
        outcome := 'mismatch';
        RETURN NEXT;
        RETURN;
    END IF;
    IF v_claim.state = 'done' THEN
        outcome := 'replay';
        result := v_claim.result;
        RETURN NEXT;
        RETURN;
    END IF;
    IF v_claim.state = 'running' AND v_life > clock_timestamp() THEN
        IF v_claim.grant_id = p_grant_id AND v_claim.owner = p_owner THEN
            outcome := CASE WHEN v_claim.unclear THEN 'recovered' ELSE 'fresh' END;
            token := v_claim.token;
        ELSE
            outcome := 'in_progress';
            remaining := v_life - clock_timestamp();
        END IF;
        RETURN NEXT;
        RETURN;
    END IF;
    IF NOT v_ours AND v_claim.state IS DISTINCT FROM 'poison' THEN
        outcome := 'in_progress';
        remaining := '0';
        RETURN NEXT;
        RETURN;
    END IF;

    -- 5. Free, or its owner is dead.
    IF v_claim.state = 'running' THEN
        crashes := crashes + 1;
        v_claim.unclear := true;
        IF crashes >= v_claim.max_crashes THEN
            UPDATE fencepost.claims c
               SET state = 'poison', crashes = claim_begin.crashes, unclear = true, ended_at = clock_timestamp()
             WHERE c.key = p_key;
            v_claim.state := 'poison';
        END IF;
    END IF;
    IF v_claim.state = 'poison' THEN
        outcome := 'poison';
        RETURN NEXT;
        RETURN;
    END IF;
    -- The token is drawn after the row is locked: drawn before, tokens go backwards.
    attempts := attempts + 1;
    UPDATE fencepost.claims c
       SET state = 'running', token = nextval('fencepost.fencing_token'), grant_id = p_grant_id, owner = p_owner,
           label = v_own_label, started_at = clock_timestamp(), ended_at = NULL, unclear = v_claim.unclear,
           attempts = claim_begin.attempts, crashes = claim_begin.crashes
     WHERE c.key = p_key
    RETURNING c.token INTO token;
    IF v_claim.unclear THEN
        outcome := 'recovered';
        previous := nullif(v_claim.token, 0);
    ELSE
        outcome := 'fresh';
    END IF;
    RETURN NEXT;
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_begin(text, uuid, uuid, text, text, jsonb, integer, integer, boolean) FROM PUBLIC;

-- claim_next(kind, owner, grant_ids): attempts at the next jobs of the kind that are due, as many as there are grant
-- ids: those due first come first, also those whose owner has died. Never waits for anybody. Asked again after a lost
-- answer it takes fresh grant ids: what the first call got is given back by reconcile.
CREATE FUNCTION fencepost.claim_next(p_kind text, p_owner uuid, p_grant_ids uuid[])
RETURNS TABLE (key text, token bigint, grant_id uuid, unclear boolean, previous bigint, label text, since timestamptz,
               attempts integer, failures integer, crashes integer, payload jsonb)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_want   integer := cardinality(p_grant_ids);
    v_got    integer := 0;
    v_looked boolean := false;
    v_keys   text[];
    v_tokens bigint[];
    v_labels text[];
    v_since  timestamptz[];
    v_life   timestamptz;
    v_label  text;
    v_now    timestamptz := clock_timestamp();
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.claim_next needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_kind IS NULL OR v_want IS NULL OR v_want NOT BETWEEN 1 AND 1000 OR array_position(p_grant_ids, NULL) > 0 THEN
        RAISE EXCEPTION 'claim_next takes a kind and 1 to 1000 grant ids' USING ERRCODE = 'LK005';
    END IF;
    SELECT o.expires_at, o.label INTO v_life, v_label FROM fencepost.owners o WHERE o.id = p_owner;
    IF NOT FOUND OR v_life <= v_now THEN
        RAISE EXCEPTION 'the owner that claims jobs of kind "%" is dead', p_kind USING ERRCODE = 'LK003';
    END IF;
    -- Of what is claimed the caller hears after the commit is on disk; a look that finds nothing has none.
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    -- The dead are looked for when not enough is ready, and besides now and then, so that they do not wait for ever.
    IF random() < 0.1 THEN
        v_looked := true;
        PERFORM fencepost.claim_recover(p_kind);
    END IF;
    LOOP
        -- Several are locked in one statement and marked in the next, by their keys: in one, with a limit that the
        -- planner does not know, it expects thousands and reads the whole table. One job has a statement of its own.
        IF v_want = 1 THEN
            WITH p AS MATERIALIZED (
                SELECT c.key, c.token, c.label, c.started_at FROM fencepost.claims c
                 WHERE c.kind = p_kind AND c.state = 'ready' AND c.due_at <= v_now
                 ORDER BY c.due_at, c.key LIMIT 1 FOR UPDATE SKIP LOCKED)
            UPDATE fencepost.claims c
               SET state = 'running', token = nextval('fencepost.fencing_token'), grant_id = p_grant_ids[1],
                   owner = p_owner, label = v_label, started_at = clock_timestamp(), ended_at = NULL,
                   attempts = c.attempts + 1
              FROM p WHERE c.key = p.key
            RETURNING c.key, c.token, c.grant_id, c.unclear, nullif(p.token, 0), p.label, p.started_at,
                      c.attempts, c.failures, c.crashes, c.payload
                 INTO key, token, grant_id, unclear, previous, label, since, attempts, failures, crashes, payload;
            IF FOUND THEN
                RETURN NEXT;
                v_got := 1;
            END IF;
        ELSE
            SELECT array_agg(p.key), array_agg(p.token), array_agg(p.label), array_agg(p.started_at)
              INTO v_keys, v_tokens, v_labels, v_since
              FROM (SELECT c.key, c.token, c.label, c.started_at FROM fencepost.claims c
                     WHERE c.kind = p_kind AND c.state = 'ready' AND c.due_at <= v_now
                     ORDER BY c.due_at, c.key LIMIT v_want - v_got
                     FOR UPDATE SKIP LOCKED) p;
            RETURN QUERY
                UPDATE fencepost.claims c
                   SET state = 'running', token = nextval('fencepost.fencing_token'),
                       grant_id = p_grant_ids[v_got + p.n::integer], owner = p_owner, label = v_label,
                       started_at = clock_timestamp(), ended_at = NULL, attempts = c.attempts + 1
                  FROM unnest(v_keys, v_tokens, v_labels, v_since) WITH ORDINALITY p (key, token, label, started_at, n)
                 WHERE c.key = p.key
                RETURNING c.key, c.token, c.grant_id, c.unclear, nullif(p.token, 0), p.label, p.started_at,
                          c.attempts, c.failures, c.crashes, c.payload;
            v_got := v_got + coalesce(cardinality(v_keys), 0);
        END IF;
        EXIT WHEN v_got = v_want OR v_looked OR fencepost.claim_recover(p_kind) = 0;
        v_looked := true;
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_next(text, uuid, uuid[]) FROM PUBLIC;

-- claim_recover(kind): makes ready, or poison, what runs under owners that are dead. Returns how many. A claim that
-- somebody is at, or whose complete is open, is skipped, and is there the next time.
CREATE FUNCTION fencepost.claim_recover(p_kind text) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_gone      uuid[];
    v_keys      text[];
    v_recovered bigint;
BEGIN
    -- Owner by owner through the index, not claim by claim.
    WITH RECURSIVE holders AS (
        (SELECT c.owner FROM fencepost.claims c
          WHERE c.kind = p_kind AND c.state = 'running' ORDER BY c.owner LIMIT 1)
        UNION ALL
        SELECT (SELECT c.owner FROM fencepost.claims c
                 WHERE c.kind = p_kind AND c.state = 'running' AND c.owner > h.owner ORDER BY c.owner LIMIT 1)
          FROM holders h WHERE h.owner IS NOT NULL)
    SELECT array_agg(h.owner) INTO v_gone FROM holders h
     WHERE h.owner IS NOT NULL
       AND NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = h.owner AND o.expires_at > clock_timestamp());
    IF v_gone IS NULL THEN
        RETURN 0;
    END IF;
    -- Claims, then owners by id, as everywhere.
    SELECT array_agg(l.key) INTO v_keys
      FROM (SELECT c.key FROM fencepost.claims c
             WHERE c.kind = p_kind AND c.state = 'running' AND c.owner = ANY (v_gone)
             LIMIT 1000 FOR UPDATE SKIP LOCKED) l;
    IF v_keys IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM FROM fencepost.owners o WHERE o.id = ANY (v_gone) AND o.expires_at > 'epoch' ORDER BY o.id FOR NO KEY UPDATE;
    UPDATE fencepost.owners o SET expires_at = 'epoch'
     WHERE o.id = ANY (v_gone) AND o.expires_at > 'epoch' AND o.expires_at <= clock_timestamp();
    -- The mark, and no clock: what is alive now was alive when its row was locked.
    UPDATE fencepost.claims c
       SET state = CASE WHEN c.crashes + 1 < c.max_crashes THEN 'ready' ELSE 'poison' END,
           crashes = c.crashes + 1, unclear = true, ended_at = clock_timestamp()
     WHERE c.key = ANY (v_keys)
       AND NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = c.owner AND o.expires_at > 'epoch');
    GET DIAGNOSTICS v_recovered = ROW_COUNT;
    RETURN v_recovered;
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_recover(text) FROM PUBLIC;

-- claim_fence(key, token, grant_id): the fence of an attempt, for a transaction that writes and does not end it.
-- Raises as fencepost.fence does: LK001 another attempt has the key, LK002 this one has ended or its owner is dead,
-- 40001 under REPEATABLE READ and SERIALIZABLE. Until the transaction ends nobody else begins; an idle writer blocks
-- the next attempt no longer than its owner's ttl.
CREATE FUNCTION fencepost.claim_fence(p_key text, p_token bigint, p_grant_id uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_state   text;
    v_token   bigint;
    v_grant   uuid;
    v_owner   uuid;
    v_life    timestamptz;
    v_ttl     interval;
    v_why     text;
    v_bound   float8;
    v_setting text;
BEGIN
    SELECT c.state, c.token, c.grant_id, c.owner INTO v_state, v_token, v_grant, v_owner
      FROM fencepost.claims c WHERE c.key = p_key FOR KEY SHARE;
    IF NOT FOUND AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'could not serialize access: claim "%" is not in the snapshot', p_key
              USING ERRCODE = 'serialization_failure', HINT = 'It may have been begun since. Roll back and look again.';
    END IF;
    IF NOT FOUND OR p_token IS NULL OR p_grant_id IS NULL
       OR v_token <> p_token OR v_grant IS DISTINCT FROM p_grant_id THEN
        RAISE EXCEPTION 'stale attempt: claim "%" with token % is not running any more', p_key, p_token
              USING ERRCODE = 'LK001',
                    DETAIL = jsonb_build_object('name', p_key, 'token', p_token, 'current', nullif(v_token, 0)),
                    HINT = 'Roll back: a later attempt has it, or there is no such claim.';
    END IF;
    -- The lock is held: judge now, in statements of their own.
    IF v_state <> 'running' THEN
        v_why := 'settled';
    ELSE
        SELECT o.expires_at, o.ttl INTO v_life, v_ttl FROM fencepost.owners o WHERE o.id = v_owner;
        IF v_life IS NULL OR v_life <= clock_timestamp() THEN
            IF v_life > 'epoch' AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
                -- The snapshot may be older than the last heartbeat: see fencepost.fence.
                BEGIN
                    PERFORM FROM fencepost.owners o WHERE o.id = v_owner FOR SHARE NOWAIT;
                EXCEPTION WHEN lock_not_available THEN
                    RAISE EXCEPTION 'could not serialize access: the owner of claim "%" is beating', p_key
                          USING ERRCODE = 'serialization_failure';
                END;
            END IF;
            v_why := 'expired';
        END IF;
    END IF;
    IF v_why IS NOT NULL THEN
        RAISE EXCEPTION 'lost: claim "%" with token % has %', p_key, p_token,
                        CASE v_why WHEN 'settled' THEN 'been ended' ELSE v_why END
              USING ERRCODE = 'LK002',
                    DETAIL = jsonb_build_object('name', p_key, 'token', p_token, 'why', v_why),
                    HINT = 'Roll back: the next attempt may already be at work.';
    END IF;
    v_bound := greatest(1, least(2147483647, floor(1000 * date_part('epoch', v_ttl))));
    v_setting := current_setting('idle_in_transaction_session_timeout');
    IF v_setting = '0' OR 1000 * date_part('epoch', v_setting::interval) > v_bound THEN
        v_setting := set_config('idle_in_transaction_session_timeout', v_bound::bigint::text, true);
    END IF;
    v_bound := least(v_bound, 1000);
    v_setting := current_setting('client_connection_check_interval');
    IF (v_setting = '0' OR 1000 * date_part('epoch', v_setting::interval) > v_bound)
       AND version() LIKE '%linux%' THEN    -- other systems may refuse anything but 0
        v_setting := set_config('client_connection_check_interval', v_bound::bigint::text, true);
    END IF;
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_fence(text, bigint, uuid) FROM PUBLIC;

-- claim_complete(key, token, grant_id, result): done, with the caller's transaction. Raises as claim_fence does.
CREATE FUNCTION fencepost.claim_complete(p_key text, p_token bigint, p_grant_id uuid, p_result jsonb DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF pg_column_size(p_result) > 1048576 THEN
        RAISE EXCEPTION 'a result is at most 1 MB as jsonb, not % bytes', pg_column_size(p_result) USING ERRCODE = 'LK005';
    END IF;
    PERFORM fencepost.claim_fence(p_key, p_token, p_grant_id);
    -- The fence keeps others out, not this attempt's own other transactions: asked again.
    UPDATE fencepost.claims c
       SET state = 'done', result = p_result, error = NULL, unclear = false, ended_at = clock_timestamp()
     WHERE c.key = p_key AND c.token = p_token AND c.grant_id = p_grant_id AND c.state = 'running';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'lost: claim "%" with token % has been ended', p_key, p_token
              USING ERRCODE = 'LK002',
                    DETAIL = jsonb_build_object('name', p_key, 'token', p_token, 'why', 'settled');
    END IF;
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_complete(text, bigint, uuid, jsonb) FROM PUBLIC;

-- claim_fail(key, token, grant_id, error, pause): this attempt has failed and says so; with the caller's transaction.
-- Ready again, for claim_next after the pause; true: or poison, since that was the last failure it may have.
CREATE FUNCTION fencepost.claim_fail(
    p_key text, p_token bigint, p_grant_id uuid, p_error text, p_pause interval DEFAULT '0')
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_state text;
BEGIN
    IF octet_length(p_error) > 8192 THEN
        RAISE EXCEPTION 'an error is at most 8192 bytes, not %', octet_length(p_error) USING ERRCODE = 'LK005';
    END IF;
    IF p_pause IS NULL OR p_pause < '0' OR p_pause > interval '366 days' THEN
        RAISE EXCEPTION 'a pause is 0 to 366 days, not %', p_pause USING ERRCODE = 'LK005';
    END IF;
    PERFORM fencepost.claim_fence(p_key, p_token, p_grant_id);
    UPDATE fencepost.claims c
       SET state = CASE WHEN c.failures + 1 < c.max_failures THEN 'ready' ELSE 'poison' END,
           failures = c.failures + 1, error = p_error, unclear = false,
           due_at = CASE WHEN p_pause > '0' THEN clock_timestamp() + p_pause ELSE c.due_at END,
           ended_at = clock_timestamp()
     WHERE c.key = p_key AND c.token = p_token AND c.grant_id = p_grant_id AND c.state = 'running'
    RETURNING c.state INTO v_state;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'lost: claim "%" with token % has been ended', p_key, p_token
              USING ERRCODE = 'LK002',
                    DETAIL = jsonb_build_object('name', p_key, 'token', p_token, 'why', 'settled');
    END IF;
    RETURN v_state = 'poison';
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_fail(text, bigint, uuid, text, interval) FROM PUBLIC;

-- claim_give_back(list): ends attempts that have no end of their own: [{"key", "token", "grant_id", "why"}, …].
--   unused    nothing has been done: as if it had never begun
--   dropped   ended without a word: counted as a crash, and recovered by the next attempt
--   unknown   found by reconcile: recovered by the next attempt, counted as nothing
-- Answers for each whether it was given back, gone (ended before, or somebody else's by now), or busy: a transaction
-- that may end it is open; ask again. Never waits for anybody.
CREATE FUNCTION fencepost.claim_give_back(p_list jsonb) RETURNS TABLE (grant_id uuid, outcome text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_one record;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.claim_give_back needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    -- Most of them have ended by then: told by one plain look.
    FOR v_one IN
        SELECT x.key, x.token, x.grant_id, x.why,
               EXISTS (SELECT FROM fencepost.claims c
                        WHERE c.key = x.key AND c.token = x.token AND c.grant_id = x.grant_id AND c.state = 'running')
               AS running
          FROM jsonb_to_recordset(p_list) AS x (key text, token bigint, grant_id uuid, why text)
         ORDER BY x.key
    LOOP
        grant_id := v_one.grant_id;
        outcome := 'gone';
        IF v_one.running THEN
            -- NO KEY UPDATE passes the KEY SHARE of open fences; the next begin waits for those.
            PERFORM FROM fencepost.claims c WHERE c.key = v_one.key FOR NO KEY UPDATE SKIP LOCKED;
            IF NOT FOUND THEN
                outcome := 'busy';
            ELSE
                UPDATE fencepost.claims c
                   SET state = CASE WHEN v_one.why = 'dropped' AND c.crashes + 1 >= c.max_crashes
                                    THEN 'poison' ELSE 'ready' END,
                       crashes = c.crashes + CASE WHEN v_one.why = 'dropped' THEN 1 ELSE 0 END,
                       unclear = c.unclear OR v_one.why IS DISTINCT FROM 'unused',
                       ended_at = clock_timestamp()
                 WHERE c.key = v_one.key AND c.token = v_one.token AND c.grant_id = v_one.grant_id
                   AND c.state = 'running';
                IF FOUND THEN
                    outcome := 'given back';
                END IF;
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_give_back(jsonb) FROM PUBLIC;

-- claim_poisoned(kind, limit): what has failed or crashed too often and waits for a person; of one kind, or all.
CREATE FUNCTION fencepost.claim_poisoned(p_kind text DEFAULT NULL, p_limit bigint DEFAULT 1000)
RETURNS TABLE (key text, kind text, failures integer, crashes integer, error text, label text, since timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
        SELECT c.key, c.kind, c.failures, c.crashes, c.error, c.label, c.ended_at FROM fencepost.claims c
         WHERE c.state = 'poison' AND (p_kind IS NULL OR c.kind = p_kind)
         ORDER BY c.ended_at, c.key LIMIT p_limit;
END $$;
CREATE INDEX claims_poison ON fencepost.claims (ended_at) WHERE state = 'poison';
REVOKE ALL ON FUNCTION fencepost.claim_poisoned(text, bigint) FROM PUBLIC;

-- claim_retry(key): a person has looked at the poison: ready again, with its counts at nothing. False: it is not poison.
CREATE FUNCTION fencepost.claim_retry(p_key text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE fencepost.claims c SET state = 'ready', failures = 0, crashes = 0, due_at = clock_timestamp()
     WHERE c.key = p_key AND c.state = 'poison';
    RETURN FOUND;
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_retry(text) FROM PUBLIC;

-- claim_prune(older_than): forgets what has been done for so long, and with it that it has been done. What is ready,
-- running or poison is kept; a row that somebody is at is skipped.
CREATE FUNCTION fencepost.claim_prune(p_older_than interval) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_before timestamptz;
    v_pruned bigint;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.claim_prune needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_older_than IS NULL OR p_older_than < interval '0' OR p_older_than > interval '1000 years' THEN
        RAISE EXCEPTION 'claim_prune takes an age of 0 to 1000 years, not %', p_older_than USING ERRCODE = 'LK005';
    END IF;
    v_before := clock_timestamp() - p_older_than;
    DELETE FROM fencepost.claims d WHERE d.key IN (
        SELECT c.key FROM fencepost.claims c WHERE c.state = 'done' AND c.ended_at < v_before
         ORDER BY c.key FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_pruned = ROW_COUNT;
    RETURN v_pruned;
END $$;
REVOKE ALL ON FUNCTION fencepost.claim_prune(interval) FROM PUBLIC;
