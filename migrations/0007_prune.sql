-- prune(older_than): deletes owners dead and leases free for so long. Tokens go on rising: they come
-- from the sequence, not from the row.
--
-- A lease row may go only while nobody is about to grant it with a token drawn already: the table lock
-- shuts out every statement that writes leases, and lets open fences (ROW SHARE) be. It does not wait:
-- 55P03 says that somebody was at it; call again.
CREATE FUNCTION fencepost.prune(p_older_than interval) RETURNS TABLE (owners bigint, leases bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_before timestamptz;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'fencepost.prune needs READ COMMITTED' USING ERRCODE = 'LK004';
    END IF;
    IF p_older_than IS NULL OR p_older_than < interval '0' OR p_older_than > interval '1000 years' THEN
        RAISE EXCEPTION 'prune takes an age of 0 to 1000 years, not %', p_older_than USING ERRCODE = 'LK005';
    END IF;
    LOCK TABLE fencepost.leases IN SHARE ROW EXCLUSIVE MODE NOWAIT;
    v_before := clock_timestamp() - p_older_than;
    -- Owners first: this waits for a heartbeat in flight and judges again. From then on they are dead,
    -- whatever happens; a lease whose owner has only expired so far is not anybody's to delete.
    DELETE FROM fencepost.owners o WHERE o.expires_at < v_before AND o.started_at < v_before;
    GET DIAGNOSTICS owners = ROW_COUNT;
    DELETE FROM fencepost.waiters w
     WHERE NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = w.owner AND o.expires_at > 'epoch');
    -- Free since: the release or the cap; under a dead owner, whose end is not known, the grant.
    DELETE FROM fencepost.leases l
     WHERE (l.released_at < v_before
            OR l.expires_at < v_before
            OR (l.owner IS NOT NULL AND l.granted_at < v_before
                AND NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = l.owner AND o.expires_at > 'epoch')))
       AND NOT EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = l.name);
    GET DIAGNOSTICS leases = ROW_COUNT;
    RETURN NEXT;
END $$;
REVOKE ALL ON FUNCTION fencepost.prune(interval) FROM PUBLIC;
