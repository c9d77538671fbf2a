//! Replies as no server sends them: what a seed determines is done to some of the messages of the server.

use crate::dice::Dice;

/// Damages about one message in so many.
#[derive(Debug)]
pub(crate) struct Mangler {
    dice: Dice,
    one_in: u64,
    /// How many messages were damaged.
    pub(crate) done: u32,
}

impl Mangler {
    pub(crate) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let one_in = *dice.pick(&[3, 10, 30, 80]);
        Self { dice, one_in, done: 0 }
    }

    /// Mangles the message, or lets it pass. Whether the connection ends after it.
    pub(crate) fn pass(&mut self, message: &mut Vec<u8>) -> bool {
        if self.dice.below(self.one_in) > 0 {
            return false;
        }
        let kind = char::from(message[0]);
        let way = match kind {
            'D' | 'T' | 'Z' if self.dice.percent(60) => "inside",
            _ => *self.dice.pick(&[
                "a bit",
                "a byte",
                "short",
                "cut",
                "twice",
                "dropped",
                "length",
                "garbage before",
                "a stranger before",
            ]),
        };
        self.done += 1;
        match way {
            "inside" => match kind {
                'D' => self.row(message),
                'T' => self.columns(message),
                _ => self.status(message),
            },
            "a bit" => *self.any(message) ^= 1 << self.dice.below(8),
            "a byte" => *self.any(message) = self.byte(),
            // Shorter than it was, and says so.
            "short" => {
                message.truncate(5 + self.index(message.len() - 4));
                resize(message);
            }
            "cut" => {
                message.truncate(self.index(message.len()));
                return true;
            }
            "twice" => message.extend_from_within(..),
            "dropped" => message.clear(),
            "length" => {
                let length: u32 = *self.dice.pick(&[0, 1, 3, 4, 5, 1_000, 1 << 24]);
                message[1..5].copy_from_slice(&length.to_be_bytes());
            }
            "garbage before" => {
                let garbage: Vec<u8> = (0..self.dice.between(1, 20)).map(|_| self.byte()).collect();
                message.splice(0..0, garbage);
            }
            _ => {
                let body: Vec<u8> = (0..self.dice.below(40)).map(|_| self.byte()).collect();
                let mut stranger = vec![*self.dice.pick(b"123ACDEGHIKNRSTZcdnstvW"), 0, 0, 0, 0];
                stranger.extend(body);
                resize(&mut stranger);
                message.splice(0..0, stranger);
            }
        }
        false
    }

    /// A row of data: another number of columns, or one of its values nothing, empty, of another length, or other.
    fn row(&mut self, message: &mut Vec<u8>) {
        let columns = u16::from_be_bytes([message[5], message[6]]);
        if self.dice.percent(25) || columns == 0 {
            let wrong = *self.dice.pick(&[0, columns.wrapping_sub(1), columns + 1, u16::MAX]);
            message[5..7].copy_from_slice(&wrong.to_be_bytes());
            return;
        }
        // To the value.
        let mut at = 7;
        for _ in 0..self.dice.below(columns.into()) {
            at += 4 + width(message, at);
        }
        let (value, old) = (at + 4, width(message, at));
        match self.dice.below(6) {
            // The length alone.
            0 => {
                let wrong = *self.dice.pick(&[-1, -2, i32::MIN, i32::MAX, 0, 1, 100]);
                message[at..value].copy_from_slice(&wrong.to_be_bytes());
            }
            1 => {
                message[at..value].copy_from_slice(&(-1_i32).to_be_bytes());
                message.drain(value..value + old);
            }
            _ => {
                let new: Vec<u8> =
                    (0..*self.dice.pick(&[0, 1, old, old, 9, 40])).map(|_| self.byte()).collect();
                message[at..value].copy_from_slice(&i32::try_from(new.len()).unwrap().to_be_bytes());
                message.splice(value..value + old, new);
            }
        }
        resize(message);
    }

    /// The description of the columns: another type, format or name of one of them, or fewer of them.
    fn columns(&mut self, message: &mut [u8]) {
        let columns = u16::from_be_bytes([message[5], message[6]]);
        if self.dice.percent(25) || columns == 0 {
            let wrong = *self.dice.pick(&[0, columns.wrapping_sub(1), columns + 1, u16::MAX]);
            message[5..7].copy_from_slice(&wrong.to_be_bytes());
            return;
        }
        let mut at = 7;
        for _ in 0..self.dice.below(columns.into()) {
            at += message[at..].iter().position(|byte| *byte == 0).unwrap() + 19;
        }
        let end = at + message[at..].iter().position(|byte| *byte == 0).unwrap();
        match self.dice.below(3) {
            0 if end > at => message[at] = self.byte(),
            1 => message[end + 17..end + 19].copy_from_slice(&[0, *self.dice.pick(&[0, 1, 2])]),
            // bool, bytea, int8, int4, text, json, uuid, void, int8[], and one that is none.
            _ => {
                let oid = *self.dice.pick(&[16_u32, 17, 20, 23, 25, 114, 2_950, 2_278, 1_016, 999_999]);
                message[end + 7..end + 11].copy_from_slice(&oid.to_be_bytes());
            }
        }
    }

    fn status(&mut self, message: &mut Vec<u8>) {
        message.truncate(5);
        message.extend(self.dice.pick(&[&b"I"[..], b"T", b"E", b"x", b"", b"IT"]).iter());
        resize(message);
    }

    /// Any byte but the highest of the length: the driver reserves what a length says, and 4 GB may be too much
    /// for the machine.
    fn any<'a>(&mut self, message: &'a mut [u8]) -> &'a mut u8 {
        let at = self.index(message.len());
        &mut message[if at == 1 { 0 } else { at }]
    }

    fn index(&mut self, below: usize) -> usize {
        usize::try_from(self.dice.below(u64::try_from(below).unwrap())).unwrap()
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.dice.below(256)).unwrap()
    }
}

/// How many bytes the value has whose length is at `at`.
fn width(message: &[u8], at: usize) -> usize {
    // Less than none: nothing.
    usize::try_from(i32::from_be_bytes(message[at..at + 4].try_into().unwrap())).unwrap_or(0)
}

/// Makes the length fit.
fn resize(message: &mut [u8]) {
    let length = u32::try_from(message.len() - 1).unwrap();
    message[1..5].copy_from_slice(&length.to_be_bytes());
}
