-- Schedules: since when each is known, and up to which slot all is settled. Slots that run are claims.

CREATE TABLE fencepost.schedules (
    name    text        PRIMARY KEY,
    since   timestamptz NOT NULL,  -- what was due before is nobody's
    settled timestamptz            -- the last slot up to which nothing is to be done any more, whatever claims are pruned
);
REVOKE ALL ON fencepost.schedules FROM PUBLIC;

-- schedule_look(name): what tells which slots are due: the database's clock, and the marks above. Makes the schedule
-- known.
CREATE FUNCTION fencepost.schedule_look(p_name text)
RETURNS TABLE (looked_at timestamptz, since timestamptz, settled timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.schedule_look needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_name IS NULL OR octet_length(p_name) NOT BETWEEN 1 AND 200 OR p_name ~ '[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'a schedule''s name is 1 to 200 bytes without control characters' USING ERRCODE = 'LK005';
    END IF;
    SELECT s.since, s.settled INTO since, settled FROM fencepost.schedules s WHERE s.name = p_name;
    IF NOT FOUND THEN
        INSERT INTO fencepost.schedules AS s (name, since) VALUES (p_name, clock_timestamp())
        ON CONFLICT ON CONSTRAINT schedules_pkey DO NOTHING;
        SELECT s.since, s.settled INTO since, settled FROM fencepost.schedules s WHERE s.name = p_name;
    END IF;
    -- Last: what is due at this moment was due when the marks were read, or will be at the next look.
    looked_at := clock_timestamp();
    RETURN NEXT;
END $$;
REVOKE ALL ON FUNCTION fencepost.schedule_look(text) FROM PUBLIC;

-- schedule_settle(name, slot): nothing is to be done any more up to this slot. It only grows, and never into the future.
CREATE FUNCTION fencepost.schedule_settle(p_name text, p_slot timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.schedule_settle needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_slot IS NULL OR p_slot > clock_timestamp() THEN
        RAISE EXCEPTION 'a slot that is not due is not settled' USING ERRCODE = 'LK005';
    END IF;
    UPDATE fencepost.schedules s SET settled = p_slot
     WHERE s.name = p_name AND (s.settled IS NULL OR s.settled < p_slot);
END $$;
REVOKE ALL ON FUNCTION fencepost.schedule_settle(text, timestamptz) FROM PUBLIC;
