//! What a guest asked for and was told, kept to explain a violation.

use std::fmt;
use std::ops::Range;

/// Names a request that a [`crate::Model`] was told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub(crate) u64);

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Wrote { range: Range<u64>, value: u64, durable: bool },
    Discarded { range: Range<u64> },
    Flushes,
    Reads { range: Range<u64> },
    Acknowledged,
    Failed,
    Returned(Vec<u64>),
}

/// The newest events to keep: enough to explain, not enough to burden a long run.
const KEEP: usize = 4096;
/// The newest events to show.
const SHOW: usize = 40;

#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    events: Vec<(Token, Event)>,
}

impl History {
    pub(crate) fn push(&mut self, token: Token, event: Event) {
        if self.events.len() >= 2 * KEEP {
            self.events.drain(..KEEP);
        }
        self.events.push((token, event));
    }

    /// What happened to a sector, flushes included, one line each, the newest last.
    pub(crate) fn of_sector(&self, sector: u64) -> Vec<String> {
        let mut named: Vec<(Token, u64)> = Vec::new();
        let mut lines = Vec::new();
        for (token, event) in &self.events {
            let request = token.0;
            let known = named.iter().find(|(name, _)| name == token).map(|(_, start)| *start);
            let line = match event {
                Event::Wrote { range, value, durable } if range.contains(&sector) => {
                    let durable = if *durable { ", durable" } else { "" };
                    format!("{request}: write of {value:#x} to {range:?}{durable}")
                }
                Event::Discarded { range } if range.contains(&sector) => {
                    format!("{request}: discard of {range:?}")
                }
                Event::Reads { range } if range.contains(&sector) => {
                    named.push((*token, range.start));
                    lines.push(format!("{request}: read of {range:?}"));
                    continue;
                }
                Event::Flushes => format!("{request}: flush"),
                Event::Acknowledged if known.is_some() => format!("{request}: done"),
                Event::Failed if known.is_some() => format!("{request}: failed"),
                Event::Returned(values) => {
                    let Some(start) = known else { continue };
                    let value = values.get((sector - start) as usize).copied().unwrap_or(0);
                    lines.push(format!("{request}: gave {value:#x}"));
                    continue;
                }
                _ => continue,
            };
            if known.is_none() {
                named.push((*token, 0));
            }
            lines.push(line);
        }
        lines.split_off(lines.len().saturating_sub(SHOW))
    }
}

/// A sector holds what no history allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The sector.
    pub sector: u64,
    /// The value found.
    pub found: u64,
    /// The values it may have had.
    pub allowed: Vec<u64>,
    /// Where it was found.
    pub found_by: &'static str,
    /// The requests that touched the sector, in order.
    pub story: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation { sector, found, allowed, found_by, story } = self;
        write!(f, "{found_by}: sector {sector} holds {found:#x}, and may hold {allowed:#x?}; ")?;
        write!(f, "what was asked of it:\n  {}", story.join("\n  "))
    }
}

impl std::error::Error for Violation {}
