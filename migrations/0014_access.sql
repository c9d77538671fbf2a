-- Who may call what, and which version this schema is.

-- allow(role): what an application needs and nothing else: it can lock, it cannot forge a token or edit
-- a lease. Not granted: revoke, protect, unprotect, allow, and every table and sequence.
-- Called by the owner of the schema; a later migration that adds a function repeats it for the roles
-- that have USAGE.
CREATE FUNCTION fencepost.allow(p_role regrole) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_function text;
BEGIN
    IF p_role IS NULL THEN
        RAISE EXCEPTION 'allow takes a role, not null' USING ERRCODE = 'LK005';
    END IF;
    EXECUTE format('GRANT USAGE ON SCHEMA fencepost TO %s', p_role);
    FOREACH v_function IN ARRAY ARRAY[
        'owner_start', 'heartbeat', 'owner_stop', 'acquire', 'release', 'hand_over', 'withdraw', 'owned', 'wake_channel',
        'fence', 'advance', 'partition_lease', 'partition_for', 'member_round', 'member_leave',
        'leader', 'ask_to_resign', 'permit_acquire', 'semaphore_resize',
        'advisory_key', 'advisory_note', 'advisory_locks', 'prune', 'version',
        'once', 'once_each', 'claim_enqueue', 'claim_begin', 'claim_next', 'claim_fence', 'claim_complete', 'claim_fail',
        'claim_give_back', 'claim_poisoned', 'claim_retry', 'claim_prune',
        'schedule_look', 'schedule_settle']
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION fencepost.%I TO %s', v_function, p_role);
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION fencepost.allow(regrole) FROM PUBLIC;

-- version(): the number of the last migration, and the oldest library version that this schema serves.
-- A library of version v works while compatible_from <= v <= version.
CREATE FUNCTION fencepost.version() RETURNS TABLE (version integer, compatible_from integer)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT 14, 14
$$;
REVOKE ALL ON FUNCTION fencepost.version() FROM PUBLIC;
