-- The fence: a check in the transaction of the write, which no later grant can overtake.

-- fence(name, token, grant_id): call it inside BEGIN … COMMIT with the write. Returns, or raises
--   LK001  another grant has the lease now (or there is none of this name): a stale holder
--   LK002  this grant has ended: released, revoked, capped, or its owner is dead
--   40001  (REPEATABLE READ, SERIALIZABLE) the lease has moved on since the snapshot: roll back, look again
-- After it returns, nobody else is granted the lease until this transaction ends: the row is locked FOR
-- KEY SHARE, and whoever grants locks it FOR UPDATE first. In autocommit the lock ends with the
-- statement and protects nothing; in a savepoint that is rolled back it is gone.
--
-- So that a paused or killed writer cannot block the next holder for longer than its own life, the
-- transaction's idle_in_transaction_session_timeout is lowered to the ttl (or what is left of the cap)
-- and a client that is gone is noticed in mid-statement (client_connection_check_interval). Both are
-- only ever lowered, and only for this transaction. A writer that goes on sending statements is not idle: it
-- is waited for, as is one in the middle of a statement.
CREATE FUNCTION fencepost.fence(p_name text, p_token bigint, p_grant_id uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_token    bigint;
    v_grant    uuid;
    v_owner    uuid;
    v_cap      timestamptz;
    v_released timestamptz;
    v_life     timestamptz;
    v_ttl      interval;
    v_why      text;
    v_bound    float8;  -- milliseconds a writer may be idle, or gone
    v_setting  text;
    v_pass     text;
BEGIN
    SELECT l.token, l.grant_id, l.owner, l.expires_at, l.released_at
      INTO v_token, v_grant, v_owner, v_cap, v_released
      FROM fencepost.leases l WHERE l.name = p_name FOR KEY SHARE;
    IF NOT FOUND AND starts_with(p_name, 'fencepost:semaphore:') THEN
        v_ttl := fencepost.permit_fence(substr(p_name, 21), p_token, p_grant_id);
    ELSIF NOT FOUND AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'could not serialize access: lease "%" is not in the snapshot', p_name
              USING ERRCODE = 'serialization_failure', HINT = 'It may have been granted since. Roll back and look again.';
    END IF;
    IF v_ttl IS NULL
       AND (NOT FOUND OR v_token <> p_token OR v_grant <> p_grant_id OR p_token IS NULL OR p_grant_id IS NULL) THEN
        RAISE EXCEPTION 'stale fence: lease "%" with token % is not held any more', p_name, p_token
              USING ERRCODE = 'LK001',
                    DETAIL = jsonb_build_object('name', p_name, 'token', p_token, 'current', v_token),
                    HINT = 'Roll back: another holder has it, or the name was never granted.';
    END IF;
    -- The lock is held: judge now, in statements of their own.
    IF v_released IS NOT NULL THEN
        v_why := 'released';
    ELSIF v_cap <= clock_timestamp() THEN
        v_why := 'expired';
    ELSIF v_owner IS NOT NULL THEN
        SELECT o.expires_at, o.ttl INTO v_life, v_ttl FROM fencepost.owners o WHERE o.id = v_owner;
        IF v_life IS NULL OR v_life <= clock_timestamp() THEN
            IF v_life > 'epoch' AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
                -- The snapshot may be older than the last heartbeat. The lock succeeds only on a row that
                -- has not changed since the snapshot: then the owner is dead indeed. Otherwise 40001.
                BEGIN
                    PERFORM FROM fencepost.owners o WHERE o.id = v_owner FOR SHARE NOWAIT;
                EXCEPTION WHEN lock_not_available THEN
                    RAISE EXCEPTION 'could not serialize access: the owner of lease "%" is beating', p_name
                          USING ERRCODE = 'serialization_failure';
                END;
            END IF;
            v_why := 'expired';
        END IF;
    END IF;
    IF v_why IS NOT NULL THEN
        RAISE EXCEPTION 'lost: lease "%" with token % has %', p_name, p_token,
                        CASE v_why WHEN 'released' THEN 'been released' ELSE v_why END
              USING ERRCODE = 'LK002',
                    DETAIL = jsonb_build_object('name', p_name, 'token', p_token, 'why', v_why),
                    HINT = 'Roll back: the next holder may already be at work.';
    END IF;

    -- (date_part and assignments, not extract and PERFORM: this runs in every fenced transaction.)
    v_bound := greatest(1, least(2147483647, floor(1000 * date_part('epoch', least(v_ttl, v_cap - clock_timestamp())))));
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

    -- What the triggers of protect look for; verified there against the lease row.
    v_pass := p_grant_id || '/' || p_token || ';';
    v_setting := coalesce(current_setting('fencepost.passed', true), '');
    IF position(v_pass IN v_setting) = 0 THEN
        v_setting := set_config('fencepost.passed', v_setting || v_pass, true);
    END IF;
END $$;
REVOKE ALL ON FUNCTION fencepost.fence(text, bigint, uuid) FROM PUBLIC;

-- High-water marks, for data whose lock lives elsewhere (in another database, in etcd): the classic
-- storage check. Weaker than fence: it accepts a stale write until the new holder has written once.
CREATE TABLE fencepost.fences (
    resource text   PRIMARY KEY,
    token    bigint NOT NULL
) WITH (fillfactor = 50);
REVOKE ALL ON fencepost.fences FROM PUBLIC;

-- advance(resource, token): raises the mark, or raises LK001 if a larger token has been seen. Equal
-- passes: one holder writes many times. The mark's row stays locked until the transaction ends.
CREATE FUNCTION fencepost.advance(p_resource text, p_token bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_current bigint;
BEGIN
    IF p_resource IS NULL OR octet_length(p_resource) NOT BETWEEN 1 AND 255 OR p_resource ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a resource is 1 to 255 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    IF p_token IS NULL OR p_token < 1 THEN
        RAISE EXCEPTION 'a token is 1 or more, not %', p_token USING ERRCODE = 'LK005';
    END IF;
    INSERT INTO fencepost.fences AS f (resource, token) VALUES (p_resource, p_token)
    ON CONFLICT ON CONSTRAINT fences_pkey DO UPDATE SET token = EXCLUDED.token WHERE f.token <= EXCLUDED.token;
    IF NOT FOUND THEN
        SELECT f.token INTO v_current FROM fencepost.fences f WHERE f.resource = p_resource;
        RAISE EXCEPTION 'stale fence: "%" has seen token %, which is larger than %', p_resource, v_current, p_token
              USING ERRCODE = 'LK001',
                    DETAIL = jsonb_build_object('name', p_resource, 'token', p_token, 'current', v_current),
                    HINT = 'Roll back: a later holder has written.';
    END IF;
END $$;
REVOKE ALL ON FUNCTION fencepost.advance(text, bigint) FROM PUBLIC;
