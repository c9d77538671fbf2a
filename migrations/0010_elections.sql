-- Elections: the leader is whoever holds the lease 'fencepost:election:' || name, and its term is the token.
--
-- Campaigning is acquire, resigning is release, a leader's check is fence: all under that name, which the library
-- gives to no lease of another kind. What is here is for those who only look on.

-- leader(election): the leader, if there is one that lives: since when it leads, how long it lives unless it beats
-- again, and whether it has been asked to resign. Needs no lock and writes nothing.
CREATE FUNCTION fencepost.leader(p_election text)
RETURNS TABLE (term bigint, label text, led interval, remaining interval, asked boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
        SELECT l.token, l.label, clock_timestamp() - l.granted_at, o.expires_at - clock_timestamp(),
               coalesce(l.metadata @> '{"asked_to_resign": true}', false)
          FROM fencepost.leases l JOIN fencepost.owners o ON o.id = l.owner
         WHERE l.name = 'fencepost:election:' || p_election AND l.released_at IS NULL
           AND o.expires_at > clock_timestamp();
END $$;
REVOKE ALL ON FUNCTION fencepost.leader(text) FROM PUBLIC;

-- ask_to_resign(election, led_for): asks the leader that has led for so long; true: it is asked, by now or before.
-- It is a note on the grant, so it ends with the term: nobody is asked for what the one before was asked. The
-- leader decides what to do about it.
CREATE FUNCTION fencepost.ask_to_resign(p_election text, p_led_for interval DEFAULT '0') RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_leader record;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.ask_to_resign needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_led_for IS NULL OR p_led_for < interval '0' OR p_led_for > interval '366 days' THEN
        RAISE EXCEPTION 'a leader has led for 0 to 366 days, not %', p_led_for USING ERRCODE = 'LK005';
    END IF;
    SELECT * INTO v_leader FROM fencepost.leader(p_election);
    IF NOT FOUND OR v_leader.led < p_led_for THEN
        RETURN false;
    END IF;
    IF v_leader.asked THEN
        RETURN true;
    END IF;
    -- Only this term. (No key: it passes the leader's open fences.)
    UPDATE fencepost.leases l SET metadata = coalesce(l.metadata, '{}') || '{"asked_to_resign": true}'
     WHERE l.name = 'fencepost:election:' || p_election AND l.token = v_leader.term AND l.released_at IS NULL;
    RETURN FOUND;
END $$;
REVOKE ALL ON FUNCTION fencepost.ask_to_resign(text, interval) FROM PUBLIC;
