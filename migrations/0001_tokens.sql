-- The schema, and the sequence every fencing token comes from.

CREATE SCHEMA IF NOT EXISTS fencepost;
COMMENT ON SCHEMA fencepost IS 'Leases with fencing tokens. Written only by its own functions.';
REVOKE ALL ON SCHEMA fencepost FROM PUBLIC;

-- CACHE must stay 1: a session that caches tokens hands out smaller ones later.
-- NO CYCLE: at a million grants a second it lasts 292,000 years.
CREATE SEQUENCE fencepost.fencing_token AS bigint MINVALUE 1 CACHE 1 NO CYCLE;
REVOKE ALL ON SEQUENCE fencepost.fencing_token FROM PUBLIC;
