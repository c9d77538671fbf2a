//! A proxy that knows where the messages of the protocol begin: it counts round trips, cuts and mangles replies,
//! is slow, and turns into a black hole.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;

/// Does something to a message of the server's, and says whether the connection ends after it.
pub(crate) type Mangle = Box<dyn FnMut(&mut Vec<u8>) -> bool + Send>;

pub(crate) struct Proxy {
    port: u16,
    upstream: PgConnectOptions,
    state: Arc<State>,
}

struct State {
    /// Where new connections go.
    socket: std::sync::Mutex<std::path::PathBuf>,
    /// Messages that ask for an answer: Sync and Query. One each is a round trip.
    round_trips: AtomicU64,
    /// What is delivered next, and its answer is not: the connection ends.
    cut: std::sync::Mutex<Option<Cut>>,
    cuts: AtomicU64,
    /// How many milliseconds later arrives what asks for an answer, and what answers.
    delays: [AtomicU64; 2],
    /// Nothing passes any more, in either direction, and nobody is told.
    hole: watch::Sender<bool>,
    refuse: AtomicBool,
    /// What the server says goes through this.
    mangle: std::sync::Mutex<Option<Mangle>>,
    /// Changes when all connections end.
    hung_up: watch::Sender<()>,
}

enum Cut {
    /// A message that contains these bytes, so many times.
    Message(Vec<u8>, u32),
    /// The execution, prepared or not, of a statement whose text contains this.
    Execution(&'static str),
}

impl Proxy {
    /// In front of the server that these options reach by a Unix socket.
    pub(crate) async fn before(upstream: PgConnectOptions) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            socket: std::sync::Mutex::new(socket(&upstream)),
            round_trips: AtomicU64::new(0),
            cut: std::sync::Mutex::new(None),
            cuts: AtomicU64::new(0),
            delays: [AtomicU64::new(0), AtomicU64::new(0)],
            hole: watch::Sender::new(false),
            refuse: AtomicBool::new(false),
            mangle: std::sync::Mutex::new(None),
            hung_up: watch::Sender::new(()),
        });
        let accepting = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let state = Arc::clone(&accepting);
                if !state.refuse.load(Ordering::SeqCst) {
                    tokio::spawn(serve(state, client));
                }
            }
        });
        Self { port, upstream, state }
    }

    pub(crate) fn options(&self) -> PgConnectOptions {
        // `socket` would win over the host.
        PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(self.port)
            .ssl_mode(PgSslMode::Disable)
            .username("postgres")
            .database(self.upstream.get_database().unwrap())
    }

    pub(crate) fn round_trips(&self) -> u64 {
        self.state.round_trips.load(Ordering::SeqCst)
    }

    /// Swallows the answer to the next message that contains `text`, once.
    pub(crate) fn cut_answer_to(&self, text: impl AsRef<[u8]>) {
        self.cut_answers_to(text, 1);
    }

    /// Swallows the answers to the next so many messages that contain `text`.
    pub(crate) fn cut_answers_to(&self, text: impl AsRef<[u8]>, times: u32) {
        *self.state.cut.lock().unwrap() = Some(Cut::Message(text.as_ref().to_vec(), times));
    }

    /// Swallows the answer to the next execution of a statement whose text contains this, once.
    pub(crate) fn cut_answer_to_statement(&self, text: &'static str) {
        *self.state.cut.lock().unwrap() = Some(Cut::Execution(text));
    }

    /// No answer is to be swallowed any more.
    pub(crate) fn cut_nothing(&self) {
        *self.state.cut.lock().unwrap() = None;
    }

    /// From now on, what asks for an answer, and what answers, arrives so much later.
    pub(crate) fn slow(&self, asking: Duration, answering: Duration) {
        for (delay, by) in self.state.delays.iter().zip([asking, answering]) {
            delay.store(u64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
        }
    }

    pub(crate) fn cuts(&self) -> u64 {
        self.state.cuts.load(Ordering::SeqCst)
    }

    pub(crate) fn black_hole(&self, on: bool) {
        self.state.hole.send_replace(on);
    }

    /// What the server says is mangled from now on, or not any more.
    pub(crate) fn mangle(&self, mangle: Option<Mangle>) {
        *self.state.mangle.lock().unwrap() = mangle;
    }

    /// Ends all connections.
    pub(crate) fn hang_up(&self) {
        self.state.hung_up.send_replace(());
    }

    /// New connections go to this server from now on, as after a failover.
    pub(crate) fn switch(&self, upstream: &PgConnectOptions) {
        *self.state.socket.lock().unwrap() = socket(upstream);
    }

    /// New connections are closed at once.
    pub(crate) fn refuse(&self, on: bool) {
        self.state.refuse.store(on, Ordering::SeqCst);
    }
}

fn socket(server: &PgConnectOptions) -> std::path::PathBuf {
    let folder = server.get_socket().expect("a server on a Unix socket");
    folder.join(format!(".s.PGSQL.{}", server.get_port()))
}

async fn serve(state: Arc<State>, client: TcpStream) {
    client.set_nodelay(true).unwrap();
    let path = state.socket.lock().unwrap().clone();
    let mut hung_up = state.hung_up.subscribe();
    let Ok(server) = UnixStream::connect(path).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let swallow = Arc::new(AtomicBool::new(false));
    tokio::select! {
        () = upward(Arc::clone(&state), from_client, to_server, Arc::clone(&swallow)) => {}
        () = downward(state, from_server, to_client, swallow) => {}
        _ = hung_up.changed() => {}
    }
}

/// Client to server: message by message. The first has no type byte.
async fn upward(
    state: Arc<State>,
    mut from: OwnedReadHalf,
    mut to: tokio::net::unix::OwnedWriteHalf,
    swallow: Arc<AtomicBool>,
) {
    let mut startup = true;
    let mut before = None;
    let mut prepared = HashMap::new();
    loop {
        let mut message = vec![0; if startup { 4 } else { 5 }];
        if from.read_exact(&mut message).await.is_err() {
            return;
        }
        let (kind, length) = if startup { (0, &message[..4]) } else { (message[0], &message[1..5]) };
        let length = usize::try_from(u32::from_be_bytes(length.try_into().unwrap())).unwrap();
        let header = message.len();
        message.resize(header + length - 4, 0);
        if from.read_exact(&mut message[header..]).await.is_err() {
            return;
        }
        startup = false;
        passable(&state).await;
        // A lone Sync is the ping of an sqlx pool that takes a connection back, in the background.
        let ping = kind == b'S' && before == Some(b'S');
        before = Some(if kind == b'Q' { b'S' } else { kind });
        if matches!(kind, b'S' | b'Q') && !ping {
            state.round_trips.fetch_add(1, Ordering::SeqCst);
        }
        let statement = statement(&message, &mut prepared);
        let cut_now = {
            let mut cut = state.cut.lock().unwrap();
            let hit = cut.as_ref().is_some_and(|cut| match cut {
                Cut::Message(bytes, _) => message.windows(bytes.len()).any(|part| part == bytes),
                Cut::Execution(text) => statement.is_some_and(|statement| statement.contains(text)),
            });
            match cut.as_mut() {
                Some(Cut::Message(_, times)) if hit && *times > 1 => *times -= 1,
                _ if hit => *cut = None,
                _ => {}
            }
            hit
        };
        if matches!(kind, b'S' | b'Q') {
            late(&state.delays[0]).await;
        }
        if cut_now {
            swallow.store(true, Ordering::SeqCst);
        }
        if to.write_all(&message).await.is_err() {
            return;
        }
    }
}

/// The text of the statement that this message executes: one of its own (Query) or one that was prepared (Bind).
fn statement(message: &[u8], prepared: &mut HashMap<Vec<u8>, String>) -> Option<String> {
    let (&kind, body) = (message.first()?, message.get(5..)?);
    let mut parts = body.split(|byte| *byte == 0);
    match kind {
        b'Q' => Some(String::from_utf8_lossy(parts.next()?).into_owned()),
        b'P' => {
            let (name, text) = (parts.next()?.to_vec(), parts.next()?);
            prepared.insert(name, String::from_utf8_lossy(text).into_owned());
            None
        }
        b'B' => prepared.get(parts.nth(1)?).cloned(),
        _ => None,
    }
}

/// Server to client: message by message.
async fn downward(
    state: Arc<State>,
    from: tokio::net::unix::OwnedReadHalf,
    mut to: OwnedWriteHalf,
    swallow: Arc<AtomicBool>,
) {
    let mut from = BufReader::with_capacity(16 * 1024, from);
    loop {
        let mut message = vec![0; 5];
        if from.read_exact(&mut message).await.is_err() {
            return;
        }
        let length = usize::try_from(u32::from_be_bytes(message[1..].try_into().unwrap())).unwrap();
        message.resize(1 + length, 0);
        if from.read_exact(&mut message[5..]).await.is_err() {
            return;
        }
        passable(&state).await;
        if swallow.load(Ordering::SeqCst) {
            // ReadyForQuery, at the end of the answer.
            if message[0] == b'Z' {
                // It was carried out; nobody will hear of it.
                state.cuts.fetch_add(1, Ordering::SeqCst);
                return;
            }
            continue;
        }
        if message[0] == b'Z' {
            late(&state.delays[1]).await;
        }
        let mut ends = false;
        if let Some(mangle) = &mut *state.mangle.lock().unwrap() {
            ends = mangle(&mut message);
        }
        if to.write_all(&message).await.is_err() || ends {
            return;
        }
    }
}

async fn late(delay: &AtomicU64) {
    let delay = Duration::from_millis(delay.load(Ordering::SeqCst));
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
}

async fn passable(state: &State) {
    drop(state.hole.subscribe().wait_for(|hole| !hole).await);
}
