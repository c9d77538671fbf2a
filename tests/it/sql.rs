//! The functions, as psql and other languages call them: without an owner, with an application's rights only,
//! and against hostile callers.

use fencepost::{Error, FencingToken, GrantId, Owner};
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool, Row as _};

use crate::support::{LONG, connect, database, hold, owner, until, until_true};

async fn acquire(conn: &mut PgConnection, name: &str, at_most: &str) -> PgRow {
    sqlx::query("SELECT * FROM fencepost.acquire($1, p_at_most => $2::text::interval)")
        .bind(name)
        .bind(at_most)
        .fetch_one(conn)
        .await
        .unwrap()
}

async fn release(conn: &mut PgConnection, name: &str, token: FencingToken, id: GrantId) -> bool {
    sqlx::query_scalar("SELECT released FROM fencepost.release($1, $2, $3)")
        .bind(name)
        .bind(token)
        .bind(id)
        .fetch_one(conn)
        .await
        .unwrap()
}

fn code(refused: impl std::borrow::Borrow<sqlx::Error>) -> String {
    refused.borrow().as_database_error().expect("a report of the server").code().unwrap().into_owned()
}

// Like SET NX PX, with nothing but psql: name and time, released only by the right pair.
#[tokio::test(flavor = "multi_thread")]
async fn psql_alone_can_hold_a_lease() {
    let (database, pool) = database().await;
    let mut conn = connect(&database.options()).await;
    let row = acquire(&mut conn, "report", "1 minute").await;
    assert!(row.get::<bool, _>("granted"));
    let (token, id): (FencingToken, GrantId) = (row.get("token"), row.get("grant_id"));
    let refused = acquire(&mut conn, "report", "1 minute").await;
    assert!(!refused.get::<bool, _>("granted"));
    assert_eq!(refused.get::<FencingToken, _>("token"), token);
    assert_eq!(refused.get::<Option<GrantId>, _>("grant_id"), None, "a grant id is the holder's secret");
    assert_eq!(refused.get::<String, _>("label"), "postgres");
    // Processes with an owner respect it, and are told who has it.
    let a = owner(&pool, "a", LONG).await;
    assert!(crate::support::lease("report").try_acquire(&a).await.unwrap().is_none());
    // A wrong pair releases nothing.
    let nobody = GrantId::from(sqlx::types::Uuid::nil());
    assert!(!release(&mut conn, "report", token, nobody).await);
    assert!(!release(&mut conn, "report", FencingToken::new(token.as_i64() + 1).unwrap(), id).await);
    assert!(!release(&mut conn, "other", token, id).await);
    assert!(crate::support::lease("report").try_acquire(&a).await.unwrap().is_none());
    // Twice: the same answer.
    assert!(release(&mut conn, "report", token, id).await);
    assert!(release(&mut conn, "report", token, id).await);
    let next = hold(&a, "report").await;
    assert!(next.token() > token);
    assert!(!release(&mut conn, "report", token, id).await, "a late release does not touch the next holder");
    assert!(next.is_held() && next.release().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_owner_the_time_is_the_whole_life() {
    let (database, _pool) = database().await;
    let mut conn = connect(&database.options()).await;
    let first = acquire(&mut conn, "report", "20 milliseconds").await;
    let (token, id): (FencingToken, GrantId) = (first.get("token"), first.get("grant_id"));
    let next = until("its time is over", async || {
        let row = acquire(&mut conn, "report", "1 minute").await;
        row.get::<bool, _>("granted").then_some(row)
    })
    .await;
    assert!(next.get::<FencingToken, _>("token") > token);
    assert!(!release(&mut conn, "report", token, id).await);
    let fence =
        sqlx::query("SELECT fencepost.fence('report', $1, $2)").bind(token).bind(id).execute(&mut conn).await;
    assert_eq!(code(fence.unwrap_err()), "LK001");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_arguments_are_refused_with_their_own_code() {
    let (database, _pool) = database().await;
    let mut conn = connect(&database.options()).await;
    for bad in [
        "fencepost.acquire('x')",
        "fencepost.acquire('', p_at_most => '1 s')",
        "fencepost.acquire(NULL, p_at_most => '1 s')",
        "fencepost.acquire(repeat('x', 256), p_at_most => '1 s')",
        "fencepost.acquire(E'a\\nb', p_at_most => '1 s')",
        "fencepost.acquire('x', p_at_most => '0')",
        "fencepost.acquire('x', p_at_most => '-1 s')",
        "fencepost.acquire('x', p_at_most => '367 days')",
        "fencepost.acquire('x', p_at_most => '1 s', p_label => '')",
        "fencepost.acquire('x', p_at_most => '1 s', p_grant_id => NULL)",
        "fencepost.acquire('x', p_at_most => '1 s', p_enqueue => true)",
        "fencepost.owner_start('x', '9 ms')",
        "fencepost.owner_start('x', '25 hours')",
        "fencepost.owner_start('x', NULL)",
        "fencepost.owner_start('', '1 s')",
        "fencepost.owner_start(NULL, '1 s')",
        "fencepost.owner_start(repeat('x', 256), '1 s')",
        "fencepost.owner_start('x', '-1 s')",
        "fencepost.owner_start('x', '178000000 years')",
        "fencepost.acquire('x', p_at_most => '178000000 years')",
        "fencepost.acquire('x', p_at_most => '-178000000 years')",
        "fencepost.acquire('x', p_at_most => '1 s', p_label => repeat('x', 256))",
        "fencepost.advance('', 1)",
        "fencepost.advance('x', 0)",
        "fencepost.advance('x', NULL)",
        "fencepost.advance('x', '-9223372036854775808')",
        "fencepost.advance(NULL, 1)",
        "fencepost.advance(repeat('x', 256), 1)",
        "fencepost.advance(E'a\\nb', 1)",
        "fencepost.protect('pg_class', '')",
        "fencepost.protect('pg_class', NULL)",
        "fencepost.protect('pg_class', E'a\\tb')",
        "fencepost.protect(NULL, 'x')",
        "fencepost.unprotect(NULL)",
        "fencepost.allow(NULL)",
        "fencepost.acquire('fencepost:semaphore:x', p_at_most => '1 s')",
        "fencepost.ask_to_resign('x', '-1 s')",
        "fencepost.ask_to_resign('x', '367 days')",
        "fencepost.ask_to_resign('x', NULL)",
        "fencepost.permit_acquire('', 1, 1, gen_random_uuid())",
        "fencepost.permit_acquire(NULL, 1, 1, gen_random_uuid())",
        "fencepost.permit_acquire(repeat('x', 236), 1, 1, gen_random_uuid())",
        "fencepost.permit_acquire(E'a\\nb', 1, 1, gen_random_uuid())",
        "fencepost.permit_acquire('x', 0, 1, gen_random_uuid())",
        "fencepost.permit_acquire('x', 100001, 1, gen_random_uuid())",
        "fencepost.permit_acquire('x', NULL, 1, gen_random_uuid())",
        "fencepost.permit_acquire('x', 3, 0, gen_random_uuid())",
        "fencepost.permit_acquire('x', 3, 4, gen_random_uuid())",
        "fencepost.permit_acquire('x', 3, NULL, gen_random_uuid())",
        "fencepost.permit_acquire('x', 3, 1, NULL)",
        "fencepost.permit_acquire('x', 3, 1, gen_random_uuid(), NULL)",
        "fencepost.semaphore_resize('', 1)",
        "fencepost.semaphore_resize(NULL, 1)",
        "fencepost.semaphore_resize(repeat('x', 236), 1)",
        "fencepost.semaphore_resize('x', 0)",
        "fencepost.semaphore_resize('x', 100001)",
        "fencepost.semaphore_resize('x', NULL)",
        "fencepost.prune('-1 s')",
        "fencepost.prune('1001 years')",
        "fencepost.prune('-178000000 years')",
        "fencepost.prune(NULL)",
        "fencepost.once('')",
        "fencepost.once(NULL)",
        "fencepost.once_each(NULL)",
        "fencepost.once_each('{a,NULL}')",
        "fencepost.once_each(ARRAY[E'a\\nb'])",
        "fencepost.claim_enqueue('x', NULL)",
        "fencepost.claim_enqueue('', 'mail')",
        "fencepost.claim_enqueue('x', '')",
        "fencepost.claim_enqueue('x', 'mail', p_delay => '-1 s')",
        "fencepost.claim_enqueue('x', 'mail', p_max_crashes => 0)",
        "fencepost.claim_enqueue('x', 'mail', to_jsonb(repeat('x', 1100000)))",
        "fencepost.claim_begin('x', NULL, gen_random_uuid())",
        "fencepost.claim_begin('', gen_random_uuid(), gen_random_uuid())",
        "fencepost.claim_begin('x', gen_random_uuid(), gen_random_uuid(), '')",
        "fencepost.claim_begin('x', gen_random_uuid(), gen_random_uuid(), p_max_failures => NULL)",
        "fencepost.claim_next('mail', gen_random_uuid(), '{}')",
        "fencepost.claim_next(NULL, gen_random_uuid(), ARRAY[gen_random_uuid()])",
        "fencepost.claim_complete('x', 1, gen_random_uuid(), to_jsonb(repeat('x', 1100000)))",
        "fencepost.claim_fail('x', 1, gen_random_uuid(), repeat('x', 9000))",
        "fencepost.claim_fail('x', 1, gen_random_uuid(), 'x', '-1 s')",
        "fencepost.claim_prune('-1 s')",
    ] {
        let refused = conn.execute(AssertSqlSafe(format!("SELECT {bad}"))).await.expect_err(bad);
        assert_eq!(code(refused), "LK005", "{bad}");
    }
    for strange in ["o''brien", "\"quoted\"", "köln/日本", "$1", "back\\slash"] {
        let row: PgRow = conn
            .fetch_one(AssertSqlSafe(format!(
                "SELECT * FROM fencepost.acquire('{strange}', p_at_most => '1 s')"
            )))
            .await
            .unwrap();
        assert!(row.get::<bool, _>("granted"), "{strange}");
    }
}

// Postgres has infinite intervals since 17; before, it refuses them by itself.
#[tokio::test(flavor = "multi_thread")]
async fn infinity_is_no_time() {
    let (database, _pool) = database().await;
    let mut conn = connect(&database.options()).await;
    let known: bool = sqlx::query_scalar("SELECT current_setting('server_version_num')::int >= 170000")
        .fetch_one(&mut conn)
        .await
        .unwrap();
    for infinity in ["infinity", "-infinity"] {
        for call in [
            format!("acquire('x', p_at_most => '{infinity}')"),
            format!("owner_start('x', '{infinity}')"),
            format!("prune('{infinity}')"),
        ] {
            let refused =
                conn.execute(AssertSqlSafe(format!("SELECT fencepost.{call}"))).await.expect_err(&call);
            assert_eq!(code(refused), if known { "LK005" } else { "22007" }, "{call}");
        }
    }
}

// Null, and what nobody was ever given, is nobody and nothing: an answer, and whoever holds is not disturbed.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_found_under_null() {
    let (database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let held = hold(&a, "report").await;
    let mut conn = connect(&database.options()).await;
    for nobody in [
        "NOT EXISTS (SELECT FROM fencepost.heartbeat(NULL))",
        "NOT EXISTS (SELECT FROM fencepost.owner_stop(NULL))",
        "NOT EXISTS (SELECT FROM fencepost.owned(NULL))",
        "NOT (SELECT released FROM fencepost.release(NULL, NULL, NULL))",
        "NOT (SELECT released FROM fencepost.release('report', NULL, NULL))",
        "NOT (SELECT released FROM fencepost.release('report', '-9223372036854775808', gen_random_uuid()))",
        "NOT (SELECT revoked FROM fencepost.revoke(NULL))",
        "NOT (SELECT revoked FROM fencepost.revoke('report', 0))",
        "NOT (SELECT revoked FROM fencepost.revoke('fencepost:semaphore:x'))",
        "NOT (SELECT waiting FROM fencepost.hand_over(NULL))",
        "NOT (SELECT withdrawn OR waiting FROM fencepost.withdraw(NULL, NULL))",
        "NOT (SELECT withdrawn OR waiting FROM fencepost.withdraw('report', NULL))",
        "fencepost.wake_channel(NULL) IS NULL",
        "NOT EXISTS (SELECT FROM fencepost.leader(NULL))",
        "NOT EXISTS (SELECT FROM fencepost.leader('report'))",
        "NOT fencepost.ask_to_resign(NULL)",
        "NOT fencepost.ask_to_resign('report')",
        "NOT (SELECT released FROM fencepost.release('fencepost:semaphore:x', NULL, NULL))",
        "NOT (SELECT released FROM fencepost.release('fencepost:semaphore:x', 1, gen_random_uuid()))",
        "NOT (SELECT withdrawn FROM fencepost.withdraw('fencepost:semaphore:x', NULL))",
        "NOT EXISTS (SELECT FROM fencepost.hand_over('fencepost:semaphore:x'))",
        // A switch that is null is off.
        "(SELECT NOT granted AND ticket IS NULL FROM fencepost.acquire('report', p_at_most => '1 s', p_retry => NULL, p_enqueue => NULL))",
    ] {
        let text = AssertSqlSafe(format!("SELECT {nobody}"));
        let nothing: bool = sqlx::query_scalar(text).fetch_one(&mut conn).await.expect(nobody);
        assert!(nothing, "{nobody}");
    }
    assert!(held.is_held() && held.release().await.unwrap());
}

// C42: what changes state refuses to run where it could read stale data.
#[tokio::test(flavor = "multi_thread")]
async fn state_changes_refuse_to_run_outside_read_committed() {
    let (database, _pool) = database().await;
    let mut conn = connect(&database.options()).await;
    let id = sqlx::types::Uuid::nil();
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        for call in [
            "owner_start('a', '1 s')".into(),
            format!("heartbeat('{id}')"),
            format!("owner_stop('{id}')"),
            "acquire('x', p_at_most => '1 s')".into(),
            format!("release('x', 1, '{id}')"),
            "revoke('x')".into(),
            "hand_over('x')".into(),
            format!("withdraw('x', '{id}')"),
            "ask_to_resign('x')".into(),
            format!("permit_acquire('x', 1, 1, '{id}')"),
            "semaphore_resize('x', 1)".into(),
            format!("release('fencepost:semaphore:x', 1, '{id}')"),
            "prune('1 day')".into(),
            format!("claim_begin('x', '{id}', '{id}')"),
            format!("claim_next('x', '{id}', '{{{id}}}')"),
            "claim_give_back('[]')".into(),
            "claim_prune('1 day')".into(),
        ] {
            conn.execute(AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"))).await.unwrap();
            let refused =
                conn.execute(AssertSqlSafe(format!("SELECT fencepost.{call}"))).await.expect_err(&call);
            assert_eq!(code(refused), "LK004", "{level} {call}");
            conn.execute("ROLLBACK").await.unwrap();
        }
    }
}

/// A role of its own, and how it connects. Roles are the server's, so the name is the database's.
async fn role(pool: &PgPool, options: &PgConnectOptions) -> (String, PgConnectOptions) {
    let role = format!("app_{}", options.get_database().unwrap());
    pool.execute(AssertSqlSafe(format!("CREATE ROLE {role} LOGIN PASSWORD 'secret'"))).await.unwrap();
    (role.clone(), options.clone().username(&role).password("secret"))
}

async fn drop_role(pool: &PgPool, role: &str) {
    pool.execute(AssertSqlSafe(format!("DROP OWNED BY {role}; DROP ROLE {role}"))).await.unwrap();
}

// The GRANT recipe: it can lock; it can neither forge a token nor edit a lease.
#[tokio::test(flavor = "multi_thread")]
async fn an_application_role_can_lock_and_nothing_else() {
    let (database, pool) = database().await;
    let (role, options) = role(&pool, &database.options()).await;
    let app = sqlx::postgres::PgPoolOptions::new().max_connections(3).connect_lazy_with(options.clone());

    let refused = Owner::start(&app).await.unwrap_err();
    assert!(matches!(refused, Error::NotAllowed { .. }), "{refused:?}");
    assert!(refused.to_string().contains("fencepost.allow"), "{refused}");

    pool.execute(AssertSqlSafe(format!("SELECT fencepost.allow('{role}')"))).await.unwrap();
    let a = owner(&app, "a", LONG).await;
    let held = hold(&a, "report").await;
    let tx = held.begin(&app).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = app.begin().await.unwrap();
    fencepost::fence::advance(&mut tx, held.name(), held.token()).await.unwrap();
    tx.commit().await.unwrap();
    assert!(held.release().await.unwrap());
    let leader = fencepost::Election::named("e").unwrap().campaign(&a, fencepost::Wait::no()).await.unwrap();
    leader.begin(&app).await.unwrap().commit().await.unwrap();
    let election = fencepost::Election::named("e").unwrap();
    assert!(election.ask_to_resign(&app, std::time::Duration::ZERO).await.unwrap());
    assert_eq!(election.observe(&app).changed().await.unwrap().unwrap().term, leader.term());
    leader.resign().await.unwrap();
    let permit = fencepost::Semaphore::named("s", 2).unwrap().try_acquire(&a).await.unwrap().unwrap();
    permit.begin(&app).await.unwrap().commit().await.unwrap();
    assert!(permit.release().await.unwrap());
    fencepost::Semaphore::named("s", 3).unwrap().resize(&a).await.unwrap();
    let mut conn = connect(&options).await;
    let member = fencepost::Group::named("orders", 2).unwrap().join(&a).await.unwrap();
    member.leave().await.unwrap();
    until("nobody is at it", async || fencepost::prune(&mut conn, LONG).await.ok()).await;
    a.shutdown().await.unwrap();

    for forbidden in [
        "SELECT nextval('fencepost.fencing_token')",
        "SELECT setval('fencepost.fencing_token', 1)",
        "SELECT * FROM fencepost.fencing_token",
        "SELECT * FROM fencepost.leases",
        "SELECT * FROM fencepost.owners",
        "SELECT * FROM fencepost.members",
        "SELECT * FROM fencepost.groups",
        "SELECT * FROM fencepost.fences",
        "INSERT INTO fencepost.fences VALUES ('x', 1)",
        "UPDATE fencepost.leases SET token = 1",
        "DELETE FROM fencepost.owners",
        "SELECT fencepost.revoke('report')",
        "SELECT fencepost.protect('pg_class', 'report')",
        "SELECT fencepost.unprotect('pg_class')",
        "SELECT fencepost.require_fence()",
        "SELECT fencepost.hand_to_head('report')",
        "SELECT * FROM fencepost.waiters",
        "SELECT * FROM fencepost.permits",
        "SELECT * FROM fencepost.semaphores",
        "UPDATE fencepost.semaphores SET permits = 9",
        "SELECT fencepost.permit_take('x', 1, NULL, NULL, 'x')",
        "SELECT fencepost.permits_to_heads('x')",
        "SELECT fencepost.permit_hand_over('x')",
        "SELECT fencepost.permit_release('x', 1, NULL)",
        "SELECT fencepost.permit_revoke('x', 1)",
        "SELECT fencepost.permit_fence('x', 1, NULL)",
        "SELECT fencepost.allow('postgres')",
        "CREATE TABLE fencepost.mine ()",
        "DROP SCHEMA fencepost CASCADE",
    ] {
        let refused = conn.execute(forbidden).await.expect_err(forbidden);
        assert_eq!(code(refused), "42501", "{forbidden}");
    }
    conn.close().await.unwrap();
    app.close().await;
    drop_role(&pool, &role).await;
}

// Nobody has rights that were not given: PUBLIC has EXECUTE on every new function by default.
#[tokio::test(flavor = "multi_thread")]
async fn public_can_call_nothing_and_every_function_sets_its_search_path() {
    let (_database, pool) = database().await;
    let rows = sqlx::query(
        "SELECT p.proname::text AS name, coalesce(array_to_string(p.proconfig, ';'), '') AS config, \
         has_function_privilege('public', p.oid, 'EXECUTE') AS public, p.prosecdef AS definer, p.provolatile::text AS volatile \
         FROM pg_proc p WHERE p.pronamespace = 'fencepost'::regnamespace ORDER BY 1",
    )
    .fetch_all(&pool)
    .await
    .unwrap();
    let invoker: Vec<String> =
        rows.iter().filter(|row| !row.get::<bool, _>("definer")).map(|row| row.get("name")).collect();
    // These need the rights of their caller, the owner of the table or of the schema.
    assert_eq!(invoker, ["allow", "parts", "protect", "unprotect"]);
    assert!(rows.len() >= 14);
    for row in rows {
        let name: String = row.get("name");
        assert_eq!(row.get::<String, _>("config"), "search_path=pg_catalog, pg_temp", "{name}");
        assert!(!row.get::<bool, _>("public"), "{name}");
        assert!(
            row.get::<String, _>("volatile") == "v"
                || ["advisory_key", "partition_for", "partition_lease", "parts", "version", "wake_channel"]
                    .contains(&name.as_str()),
            "{name}"
        );
    }
}

// B7: an operator of the caller's, found before pg_catalog's, would run with the definer's rights.
#[tokio::test(flavor = "multi_thread")]
async fn a_callers_operators_and_types_are_not_used() {
    let (database, pool) = database().await;
    let (role, options) = role(&pool, &database.options()).await;
    let grant = format!(
        "SELECT fencepost.allow('{role}'); CREATE SCHEMA evil AUTHORIZATION {role}; CREATE TABLE public.caught (who text); GRANT INSERT ON public.caught TO {role}"
    );
    sqlx::raw_sql(AssertSqlSafe(grant)).execute(&pool).await.unwrap();
    let mut conn = connect(&options).await;
    // As the role of the attacker: operators that note who runs them.
    let trap = "\
        CREATE FUNCTION evil.eq(uuid, uuid) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.caught VALUES (current_user); RETURN true; END $$; \
        CREATE FUNCTION evil.eq(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.caught VALUES (current_user); RETURN true; END $$; \
        CREATE OPERATOR evil.= (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = evil.eq); \
        CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.eq); \
        CREATE DOMAIN pg_temp.uuid AS text; \
        SET search_path = evil, pg_catalog, public";
    sqlx::raw_sql(trap).execute(&mut conn).await.unwrap();
    // The trap works where nothing is done against it.
    let naive = "CREATE FUNCTION public.naive(p uuid) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN RETURN p = p; END $$";
    sqlx::raw_sql(naive).execute(&pool).await.unwrap();
    conn.execute("SELECT public.naive(gen_random_uuid())").await.unwrap();
    until_true(
        &pool,
        "the naive function is caught",
        "SELECT array_agg(who) = '{postgres}' FROM public.caught",
    )
    .await;
    pool.execute("DELETE FROM public.caught").await.unwrap();

    for call in [
        "SELECT fencepost.heartbeat(fencepost.owner_start('a', '1 minute'))",
        "SELECT * FROM fencepost.acquire('report', p_at_most => '1 minute')",
        "SELECT fencepost.release('report', 1, '00000000-0000-0000-0000-000000000000'::pg_catalog.uuid)",
        "SELECT fencepost.owned('00000000-0000-0000-0000-000000000000'::pg_catalog.uuid)",
        "SELECT fencepost.owner_stop('00000000-0000-0000-0000-000000000000'::pg_catalog.uuid)",
        "SELECT fencepost.advance('report', 1)",
        "SELECT fencepost.once('a')",
        "SELECT fencepost.once_each('{a,b}')",
        "SELECT fencepost.claim_enqueue('job', 'mail', '{}')",
        "SELECT fencepost.claim_next('mail', fencepost.owner_start('b', '1 minute'), ARRAY[pg_catalog.gen_random_uuid()])",
        "SELECT fencepost.claim_begin('c', fencepost.owner_start('c', '1 minute'), pg_catalog.gen_random_uuid())",
        "SELECT fencepost.claim_give_back('[{\"key\": \"c\", \"token\": 1}]')",
        "SELECT fencepost.claim_poisoned()",
        "SELECT fencepost.claim_retry('c')",
        "SELECT fencepost.claim_prune('1 day')",
        "SELECT fencepost.version()",
    ] {
        conn.execute(call).await.expect(call);
    }
    let fence =
        "SELECT fencepost.fence('report', 1, '00000000-0000-0000-0000-000000000000'::pg_catalog.uuid)";
    assert_eq!(code(conn.execute(fence).await.unwrap_err()), "LK001");
    let caught: i64 =
        sqlx::query_scalar("SELECT count(*) FROM public.caught").fetch_one(&pool).await.unwrap();
    assert_eq!(caught, 0);
    conn.close().await.unwrap();
    drop_role(&pool, &role).await;
}
