//! What is made of a stream, or of a file of the ledger, without a server.

use serde_json::{Value, json};

use super::refusal::Refusal;
use super::request::Request;
use super::table;
use super::wire::{Malformed, Scanner};
use crate::ledger::{self, Line};

/// What each value of a stream is taken for, which comes in pieces of so many bytes; and the most bytes that were held
/// of any of them. `return` stands for a command that would be carried out.
pub fn understand(stream: &[u8], at_a_time: usize) -> (Vec<Value>, usize) {
    let (mut scanner, mut all, mut held) = (Scanner::default(), vec![], 0);
    for piece in stream.chunks(at_a_time.max(1)) {
        scanner.feed(piece, |value| all.push(one(value)));
        held = held.max(scanner.held());
    }
    (all, held)
}

/// What a file of the ledger of jobs is taken for: the command that would begin the job anew, and whether its arguments make
/// sense.
pub fn job_of(bytes: &[u8]) -> Option<(String, bool)> {
    let Line { command, arguments, files, .. } = ledger::parse(bytes)?;
    let line_of = |image: &std::path::PathBuf| !image.as_os_str().is_empty();
    let makes_sense = table::find(&command).is_some_and(|entry| entry.check(arguments).is_ok());
    Some((command, makes_sense && files.iter().any(|(image, _)| line_of(image))))
}

fn one(value: Result<Value, Malformed>) -> Value {
    let request =
        value.map_err(|error| (None, Refusal::new(error.to_string()))).and_then(Request::of);
    let (id, refusal) = match request {
        Err(refused) => refused,
        Ok(Request { command, arguments, id }) => {
            let checked = match table::find(&command) {
                None => Err(Refusal::no_command(command)),
                Some(entry) => entry.check(arguments),
            };
            match checked {
                Ok(()) => return json!({ "return": {}, "id": id }),
                Err(refusal) => (id, refusal),
            }
        }
    };
    json!({ "error": refusal.into_value(), "id": id })
}
