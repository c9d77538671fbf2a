//! The statements of schedules.

pub(crate) const LOOK: &str = "SELECT (date_part('epoch', looked_at) * 1000000)::bigint AS looked_at, \
     (date_part('epoch', since) * 1000000)::bigint AS since, \
     (date_part('epoch', settled) * 1000000)::bigint AS settled \
     FROM fencepost.schedule_look($1::text)";

pub(crate) const SETTLE: &str = "SELECT fencepost.schedule_settle($1::text, \
     timestamptz 'epoch' + $2::bigint * interval '1 microsecond')";
