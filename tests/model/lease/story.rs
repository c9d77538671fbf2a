//! The steps in words.

use super::state::{About, Answer, Ask, BeatStage, Call, Grant, Life, Stage, State};
use super::step::Action;
use crate::letter;

pub(super) fn tell(before: &State, action: Action, after: &State) -> String {
    match action {
        Action::SendBeat(client) => format!("{} sends a heartbeat", process(client)),
        Action::JudgeBeat(client) => judged(client, after),
        Action::CommitBeat(client) => format!("the heartbeat of {} commits", letter(client)),
        Action::HearBeat(client) => {
            format!(
                "{} hears of its heartbeat, and trusts its life for {}",
                process(client),
                ticks(after.client(client).trust)
            )
        }
        Action::Restart(client) => format!("{} has lost its life, and starts again", process(client)),
        Action::Acquire(client) => format!("{} sends acquire", process(client)),
        Action::Release(client) => {
            let token = before.client(client).held.map_or(0, |held| held.token);
            format!("{} sends release of token {token}", process(client))
        }
        Action::Retry(client) => match after.client(client).about {
            Some(About::Release(_)) => format!("{} sends release again", process(client)),
            Some(About::Acquire(Grant { again: true, .. })) => {
                format!("{} sends acquire again, under another grant id", process(client))
            }
            _ => format!("{} sends acquire again", process(client)),
        },
        Action::GiveUp(client) => format!("{} gives up, and forgets the grant id", process(client)),
        Action::Draw(client, call) => match call_of(after, client, call).map(|call| call.stage) {
            Some(Stage::Drawn(token)) => format!("the server draws token {token} for {}", letter(client)),
            _ => String::new(),
        },
        Action::Arrive(client, call) => arrived(before, client, call, after),
        Action::Commit(client, _) => {
            format!("the grant of token {} to {} commits", after.db.token, letter(client))
        }
        Action::Hear(client, call) => heard(before, client, call),
        Action::Reconcile(client) => {
            if after.client(client).held == before.client(client).held {
                format!(
                    "{} does not know grant {} that is listed as its own, and sends release",
                    process(client),
                    before.db.token
                )
            } else {
                format!("{} finds that what it holds is not listed any more", process(client))
            }
        }
        Action::Fence(client) => {
            let token = before.client(client).held.map_or(0, |held| held.token);
            match after.client(client).open {
                Some(open) if open.locks => {
                    format!(
                        "{} begins a transaction and passes the fence with token {token}",
                        process(client)
                    )
                }
                Some(_) => {
                    format!("{} begins a transaction under token {token}, and locks nothing", process(client))
                }
                None => format!("the fence refuses {} with token {token}", letter(client)),
            }
        }
        Action::Read(client) => format!("{} reads the data", process(client)),
        Action::Write(client) => format!(
            "{} writes what follows from that, under token {}, and commits",
            process(client),
            after.db.written
        ),
        Action::RollBack(client) => format!("the transaction of {} is rolled back", letter(client)),
        Action::Tick => time_passes(after),
        Action::Die(client) => format!("{} dies", process(client)),
        Action::Cut(client, call) => {
            let what = match call_of(before, client, call).map(|call| call.ask) {
                Some(Ask::Release { .. }) => "release",
                _ => "acquire",
            };
            format!(
                "the connection of {} breaks: the answer to this {what} will not be heard",
                letter(client)
            )
        }
        Action::StepBack => format!("the database's clock steps back: {}", lives(after)),
        Action::ServerCrash => "the server crashes and comes back; what was not on disk is gone".to_owned(),
        Action::Replicate => "the standby catches up".to_owned(),
        Action::Failover => format!("the standby takes over: the last token is {}", after.db.sequence),
    }
}

fn process(client: u8) -> String {
    format!("process {}", letter(client))
}

fn ticks(number: u8) -> String {
    if number == 1 { "1 tick".to_owned() } else { format!("{number} ticks") }
}

fn call_of(state: &State, client: u8, call: u8) -> Option<&Call> {
    state.client(client).calls.get(usize::from(call))
}

fn judged(client: u8, after: &State) -> String {
    let lives = after.client(client).beat.is_some_and(|beat| beat.stage != BeatStage::Dead);
    let verdict = if lives { "alive for another ttl, not yet committed" } else { "dead" };
    format!("the server judges the heartbeat of {}: {verdict}", letter(client))
}

fn arrived(before: &State, client: u8, number: u8, after: &State) -> String {
    let Some(call) = call_of(before, client, number) else { return String::new() };
    let name = letter(client);
    let whose = if call.heard { String::new() } else { ", which nobody listens for".to_owned() };
    let stage = if call.heard { call_of(after, client, number).map(|call| call.stage) } else { None };
    let locked = call_of(after, client, number).map(|call| call.stage);
    if let Some(Stage::Locked { token, buries }) = locked {
        let owner = if buries { " and the dead owner's" } else { "" };
        return format!(
            "the server locks the lease's row{owner} and writes token {token} for {name}, not yet committed{whose}"
        );
    }
    match (call.ask, stage) {
        (Ask::Release { token }, _) if after.db.released && !before.db.released => {
            format!(
                "the server releases the lease (token {}) on the release of {name}{whose}, which was of token {token}",
                before.db.token
            )
        }
        (Ask::Release { token }, _) => {
            format!("the server finds token {token} of {name} released or gone{whose}")
        }
        (_, Some(Stage::Answered(Answer::Granted(token)))) => {
            format!("the server finds token {token} granted to {name} already")
        }
        (_, Some(Stage::Answered(Answer::OwnerDead))) => format!("the server finds the owner of {name} dead"),
        _ if before.db.is_held() => {
            format!(
                "the server refuses {name}: {} holds token {}{whose}",
                letter(before.db.owner),
                before.db.token
            )
        }
        _ if before.locked() => format!("the server refuses {name}: somebody is at the lease's row{whose}"),
        _ => format!("the server refuses {name}: a fenced write is open{whose}"),
    }
}

fn heard(before: &State, client: u8, number: u8) -> String {
    let Some(call) = call_of(before, client, number) else { return String::new() };
    let what = match call.stage {
        Stage::Answered(Answer::Granted(token)) if call.life == before.client(client).life => {
            format!("hears that it was granted token {token}")
        }
        Stage::Answered(Answer::Granted(_)) => "hears that the life before was granted the lease".to_owned(),
        Stage::Answered(Answer::Refused) => "hears that it is refused".to_owned(),
        Stage::Answered(Answer::OwnerDead) => "hears that its owner is dead".to_owned(),
        _ => "hears that its release is done".to_owned(),
    };
    format!("{} {what}", process(client))
}

fn time_passes(after: &State) -> String {
    let trust: Vec<String> = after
        .clients
        .iter()
        .zip(0..)
        .filter(|(client, _)| client.running)
        .map(|(client, number)| format!("{} trusts its life for {}", letter(number), ticks(client.trust)))
        .collect();
    format!("a tick passes: {}; {}", trust.join(", "), lives(after))
}

fn lives(state: &State) -> String {
    let rows = state.clients.iter().zip(0..).map(|(client, number)| {
        let row = match state.db.life(number, client.life) {
            Life::Ticks(left) => format!("{left} left"),
            Life::Dead => "marked dead".to_owned(),
            Life::Unborn => "none".to_owned(),
        };
        format!("{}: {row}", letter(number))
    });
    format!("by the database {}", rows.collect::<Vec<_>>().join(", "))
}
