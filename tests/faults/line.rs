//! What the database itself says of the queues: triggers of the test write down who queued, who left the line,
//! who was granted what while who waited, who released, and which owner beat.
//!
//! A ticket is drawn, and a lease granted and released, under the lock of the lease's row, and the trigger runs
//! in that same transaction: so for one name the numbers of these events are their true order, and the line that
//! a grant notes is the line of that instant. What is rolled back leaves no event. They only read, and lock nothing.

use sqlx::{PgPool, Row as _};

const WATCH: &str = r"
    CREATE UNLOGGED TABLE public.line (
        seq      bigint GENERATED ALWAYS AS IDENTITY,
        at       timestamptz NOT NULL DEFAULT clock_timestamp(),
        what     text NOT NULL,
        name     text NOT NULL DEFAULT '',
        grant_id uuid,
        owner    uuid,
        ticket   bigint,
        token    bigint,
        xact     bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
        -- The function of the schema that was called, and whether it was at handing to the head.
        via      text,
        to_head  boolean,
        -- The tickets in the line of this name, without that of the grant itself.
        line     bigint[]);

    CREATE FUNCTION public.note_line() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        v_stack text;
        v_calls text[];
        v_row   fencepost.waiters%ROWTYPE;
    BEGIN
        GET DIAGNOSTICS v_stack = PG_CONTEXT;
        SELECT array_agg(m[1] ORDER BY n) INTO v_calls
          FROM regexp_matches(v_stack, 'function fencepost\.(\w+)\(', 'g') WITH ORDINALITY AS r (m, n);
        IF TG_OP = 'INSERT' THEN v_row := NEW; ELSE v_row := OLD; END IF;
        INSERT INTO public.line (what, name, grant_id, owner, ticket, via, to_head)
        VALUES (CASE TG_OP WHEN 'INSERT' THEN 'queued' ELSE 'left' END,
                v_row.name, v_row.grant_id, v_row.owner, v_row.ticket,
                v_calls[cardinality(v_calls)], 'hand_to_head' = ANY (v_calls));
        RETURN NULL;
    END $$;
    CREATE TRIGGER note AFTER INSERT OR DELETE ON fencepost.waiters
        FOR EACH ROW EXECUTE FUNCTION public.note_line();

    CREATE FUNCTION public.note_lease() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        v_stack text;
        v_calls text[];
    BEGIN
        GET DIAGNOSTICS v_stack = PG_CONTEXT;
        SELECT array_agg(m[1] ORDER BY n) INTO v_calls
          FROM regexp_matches(v_stack, 'function fencepost\.(\w+)\(', 'g') WITH ORDINALITY AS r (m, n);
        INSERT INTO public.line (what, name, grant_id, owner, token, via, to_head, line)
        VALUES (CASE WHEN NEW.token <> OLD.token THEN 'granted' ELSE 'released' END,
                NEW.name, NEW.grant_id, NEW.owner, NEW.token,
                v_calls[cardinality(v_calls)], 'hand_to_head' = ANY (v_calls),
                ARRAY(SELECT w.ticket FROM fencepost.waiters w
                       WHERE w.name = NEW.name AND w.grant_id <> NEW.grant_id ORDER BY w.ticket));
        RETURN NULL;
    END $$;
    CREATE TRIGGER note AFTER UPDATE ON fencepost.leases FOR EACH ROW
        WHEN (NEW.token <> OLD.token OR (NEW.released_at IS NOT NULL AND OLD.released_at IS NULL))
        EXECUTE FUNCTION public.note_lease();

    CREATE FUNCTION public.note_beat() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.line (what, owner) VALUES ('beat', NEW.id);
        RETURN NULL;
    END $$;
    CREATE TRIGGER note AFTER UPDATE ON fencepost.owners FOR EACH ROW
        WHEN (NEW.expires_at > OLD.expires_at) EXECUTE FUNCTION public.note_beat();";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Queued,
    Left,
    Granted,
    Released,
    Beat,
    /// The controller tells everybody to end.
    Quit,
}

/// One event, in the order of `seq`.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) seq: i64,
    /// Microseconds of the database's clock.
    pub(crate) at: i64,
    pub(crate) what: What,
    pub(crate) name: String,
    pub(crate) grant: String,
    pub(crate) owner: String,
    pub(crate) ticket: Option<i64>,
    pub(crate) token: Option<i64>,
    pub(crate) xact: i64,
    pub(crate) via: String,
    pub(crate) to_head: bool,
    pub(crate) line: Vec<i64>,
}

pub(crate) async fn watch(pool: &PgPool) {
    sqlx::raw_sql(WATCH).execute(pool).await.unwrap();
}

pub(crate) async fn quit(pool: &PgPool) {
    sqlx::raw_sql("INSERT INTO public.line (what) VALUES ('quit')").execute(pool).await.unwrap();
}

/// What was written down, in order.
pub(crate) async fn read(pool: &PgPool) -> Vec<Event> {
    const EVENTS: &str = "\
        SELECT seq, (date_part('epoch', at) * 1000000)::bigint AS at, what, name, coalesce(grant_id::text, '') AS grant_id, \
               coalesce(owner::text, '') AS owner, ticket, token, xact, coalesce(via, '') AS via, \
               coalesce(to_head, false) AS to_head, coalesce(line, '{}') AS line \
          FROM public.line ORDER BY seq";
    let rows = sqlx::query(EVENTS).fetch_all(pool).await.unwrap();
    let what = |word: &str| match word {
        "queued" => What::Queued,
        "left" => What::Left,
        "granted" => What::Granted,
        "released" => What::Released,
        "beat" => What::Beat,
        "quit" => What::Quit,
        other => panic!("an event {other:?}"),
    };
    rows.iter()
        .map(|row| Event {
            seq: row.get("seq"),
            at: row.get("at"),
            what: what(row.get("what")),
            name: row.get("name"),
            grant: row.get("grant_id"),
            owner: row.get("owner"),
            ticket: row.get("ticket"),
            token: row.get("token"),
            xact: row.get("xact"),
            via: row.get("via"),
            to_head: row.get("to_head"),
            line: row.get("line"),
        })
        .collect()
}
