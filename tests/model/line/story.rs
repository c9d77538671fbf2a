//! The steps in words.

use super::state::{Answer, Id, Life, Place, State};
use super::step::Action;
use crate::letter;

pub(super) fn tell(before: &State, action: Action, after: &State) -> String {
    match action {
        Action::Ask(number) => {
            let again =
                if before.process(number).place == Place::InLine { "asks again" } else { "sends acquire" };
            let told = match after.process(number).place {
                Place::Answered(Answer::Granted) => "it has the lease".to_owned(),
                _ => format!("in line{}", granted(before, after)),
            };
            format!("{} {again}; the server answers: {told}", process(number))
        }
        Action::Hear(number) => match after.process(number).place {
            Place::Holding { .. } => format!("{} hears that it was granted the lease", process(number)),
            _ => format!("{} hears that it is in line", process(number)),
        },
        Action::GiveUp(number) => format!("{} gives up, and sends withdraw", process(number)),
        Action::Withdraw(number) => {
            let id = before.id(number);
            if before.queue.contains(&id) {
                format!("the server takes the ticket of {} back", letter(number))
            } else if after.is_free() && !before.is_free() || before.row.id != after.row.id {
                format!(
                    "the server finds {} granted, and releases it{}",
                    letter(number),
                    granted(before, after)
                )
            } else {
                format!("the server finds no ticket of {}", letter(number))
            }
        }
        Action::SendRelease(number) => format!("{} sends release", process(number)),
        Action::Release(number) => {
            let what = if before.row.id != before.id(number) || before.is_free() {
                "finds it lost before".to_owned()
            } else if after.process(number).hands_over {
                "frees the lease, which cannot be granted yet".to_owned()
            } else {
                format!("frees the lease{}", granted(before, after))
            };
            format!("the server does the release of {}: {what}", letter(number))
        }
        Action::HandOver(number) => {
            let what = if before.row.id == after.row.id {
                ": nobody is to have it".to_owned()
            } else {
                granted(before, after)
            };
            format!("{} hands over what it released{what}", process(number))
        }
        Action::Reconcile(number) => {
            format!("{} gives back a grant that it does not know{}", process(number), granted(before, after))
        }
        Action::BeginWrite(number) => {
            format!("{} begins a transaction and passes the fence", process(number))
        }
        Action::EndWrite(number) => format!("the transaction of {} ends", letter(number)),
        Action::Deliver(wake) => {
            let wake = before.wakes[usize::from(wake)];
            let forged = if wake.proven { "" } else { "forged " };
            let holds = matches!(after.process(wake.to.process).place, Place::Holding { .. });
            let believed = if holds && before.process(wake.to.process).place == Place::InLine {
                ", and believes that it holds the lease"
            } else {
                ", and does nothing"
            };
            format!("{} gets the {forged}notification{believed}", process(wake.to.process))
        }
        Action::Expire(number) => format!("the owner of {} has expired", letter(number)),
        Action::CommitBeat(number) => format!("the heartbeat of {} commits: it lives", letter(number)),
        Action::Restart(number) => format!("{} has lost its life, and starts again", process(number)),
        Action::Die(number) => format!("{} dies", process(number)),
        Action::Lapse(number, beat) => {
            let beat = if beat { ", with a heartbeat in flight" } else { "" };
            format!("{} is paused until its owner has expired{beat}", process(number))
        }
        Action::Lose(wake) => {
            format!("the notification for {} is lost", letter(before.wakes[usize::from(wake)].to.process))
        }
        Action::Forge(number) => format!("somebody sends {} a forged notification", letter(number)),
    }
}

fn process(number: u8) -> String {
    format!("process {}", letter(number))
}

/// To whom the lease goes in this step.
fn granted(before: &State, after: &State) -> String {
    let Id { process, .. } = after.row.id;
    if before.row.id == after.row.id {
        return String::new();
    }
    let dead = if after.life(after.row.id) == Life::Alive { "" } else { ", whose owner is dead" };
    format!(", and grants it to {}{dead}", letter(process))
}
