//! The statements of claims.

pub(crate) const ONCE: &str = "SELECT fencepost.once($1::text) AS ours";

/// The keys as one JSON array.
pub(crate) const ONCE_EACH: &str = "SELECT key FROM fencepost.once_each(\
     ARRAY(SELECT k FROM pg_catalog.jsonb_array_elements_text($1::text::jsonb) AS e (k)))";

pub(crate) const ENQUEUE: &str = "SELECT fencepost.claim_enqueue($1::text, $2::text, $3::text::jsonb, \
     $4::bigint * interval '1 microsecond', $5::text, $6::integer, $7::integer) AS fresh";

pub(crate) const BEGIN: &str = "SELECT outcome, token, previous, label, \
     (date_part('epoch', since) * 1000000)::bigint AS since, \
     (date_part('epoch', remaining) * 1000000)::bigint AS remaining, \
     attempts, failures, crashes, error, payload::text AS payload, result::text AS result \
     FROM fencepost.claim_begin($1::text, $2::uuid, $3::uuid, $4::text, $5::text, $6::text::jsonb, \
     $7::integer, $8::integer, $9::boolean)";

/// The grant ids as one text, `{…,…}`.
pub(crate) const NEXT: &str = "SELECT key, token, grant_id, unclear, previous, label, \
     (date_part('epoch', since) * 1000000)::bigint AS since, attempts, failures, crashes, payload::text AS payload \
     FROM fencepost.claim_next($1::text, $2::uuid, $3::text::uuid[])";

pub(crate) const FENCE: &str = "SELECT fencepost.claim_fence($1::text, $2::bigint, $3::uuid)";

pub(crate) const COMPLETE: &str =
    "SELECT fencepost.claim_complete($1::text, $2::bigint, $3::uuid, $4::text::jsonb)";

pub(crate) const FAIL: &str = "SELECT fencepost.claim_fail($1::text, $2::bigint, $3::uuid, $4::text, \
     $5::bigint * interval '1 microsecond') AS poison";

pub(crate) const GIVE_BACK: &str = "SELECT grant_id, outcome FROM fencepost.claim_give_back($1::text::jsonb)";

pub(crate) const POISONED: &str = "SELECT key, kind, failures, crashes, error, label, \
     (date_part('epoch', since) * 1000000)::bigint AS since FROM fencepost.claim_poisoned($1::text, $2::bigint)";

pub(crate) const RETRY: &str = "SELECT fencepost.claim_retry($1::text) AS retried";

pub(crate) const PRUNE: &str =
    "SELECT fencepost.claim_prune($1::bigint * interval '1 microsecond') AS pruned";
