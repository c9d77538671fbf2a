-- prune(older_than): deletes owners dead, leases and slots of semaphores free, and names of advisory locks not noted for
-- so long; the semaphores with their limits stay. Tokens go on rising: they come
-- from the sequence, and a grant draws its own after the row is locked, whether the row is old or new.
--
-- It takes no lock on a table, and waits for nobody: a row that somebody is at, or whose fence is open, is
-- skipped, and is there the next time.
CREATE FUNCTION fencepost.prune(p_older_than interval) RETURNS TABLE (owners bigint, leases bigint, permits bigint)
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
    v_before := clock_timestamp() - p_older_than;
    -- Leases before owners, as everywhere. Only an owner that is marked or missing is
    -- dead for good; one that has merely expired may have a heartbeat in flight.
    -- Free since: the release or the cap; under a dead owner, whose end is not known, the grant.
    DELETE FROM fencepost.leases d WHERE d.name IN (
        SELECT l.name FROM fencepost.leases l
         WHERE (l.released_at < v_before
                OR l.expires_at < v_before
                OR (l.owner IS NOT NULL AND l.granted_at < v_before
                    AND NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = l.owner AND o.expires_at > 'epoch')))
           AND NOT EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = l.name)
         ORDER BY l.name FOR UPDATE OF l SKIP LOCKED);
    GET DIAGNOSTICS leases = ROW_COUNT;
    DELETE FROM fencepost.permits d WHERE (d.semaphore, d.slot) IN (
        SELECT p.semaphore, p.slot FROM fencepost.permits p
         WHERE p.released_at < v_before
            OR (p.granted_at < v_before
                AND NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = p.owner AND o.expires_at > 'epoch'))
         ORDER BY p.semaphore, p.slot FOR UPDATE OF p SKIP LOCKED);
    GET DIAGNOSTICS permits = ROW_COUNT;
    DELETE FROM fencepost.owners d WHERE d.id IN (
        SELECT o.id FROM fencepost.owners o WHERE o.expires_at < v_before AND o.started_at < v_before
         ORDER BY o.id FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS owners = ROW_COUNT;
    DELETE FROM fencepost.waiters d WHERE d.grant_id IN (
        SELECT w.grant_id FROM fencepost.waiters w
         WHERE NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = w.owner AND o.expires_at > 'epoch')
         FOR UPDATE OF w SKIP LOCKED);
    -- Who goes on using a key notes its name again, each hour.
    DELETE FROM fencepost.advisory_names d WHERE (d.classid, d.objid, d.objsubid) IN (
        SELECT n.classid, n.objid, n.objsubid FROM fencepost.advisory_names n
         WHERE n.noted_at < v_before
           AND NOT EXISTS (SELECT FROM pg_locks k WHERE k.locktype = 'advisory' AND k.classid = n.classid
                              AND k.objid = n.objid AND k.objsubid = n.objsubid)
         FOR UPDATE OF n SKIP LOCKED);
    RETURN NEXT;
END $$;
REVOKE ALL ON FUNCTION fencepost.prune(interval) FROM PUBLIC;
