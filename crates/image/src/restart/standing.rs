//! Whether what a log holds belongs to the image as it is now.
//!
//! An image may have been put back to an earlier state, copied over, or written to by others since its
//! server was killed; the log would then point its tables to bytes that were never there. The witness
//! ([`ringtap_io::Witness`]) knows between which times the last write of the log's writer lies, or, of a
//! block device, how much it wrote.

use ringtap_io::{Testimony, Wall};

use crate::Standing;
use crate::file_facts::{Facts, SECOND};

/// A change in flight when the server was killed puts its stamp on the image as soon as the kernel gets to
/// it. So long after the last was begun nobody else is taken for the writer.
const SOON: Wall = 100_000_000;
/// And so long it may yet be either.
const LATE: Wall = 1_000_000_000;

/// The longest between two ticks of the kernel, whose time stamps follow them.
const TICK: Wall = 10_000_000;

impl Standing {
    /// By what the witness of the log's writer says, and the file. `before`: bytes that were written to the
    /// device when the witness began.
    pub(crate) fn of(said: Testimony, facts: &Facts, before: u64) -> Standing {
        match (facts.modified, facts.written) {
            (Some(modified), _) => by_time(said, modified, facts),
            (None, Some(written)) => by_count(said, written.checked_sub(before), facts.direct),
            (None, None) => Standing::Unknown("when it was last written to is not known".into()),
        }
    }
}

impl Standing {
    /// The same of a file that may be a copy of the one that the log's writer wrote to: whoever copies may give it the time of
    /// the copy, so that a later one says nothing.
    pub(crate) fn of_copy(said: Testimony, facts: &Facts) -> Standing {
        let Some(modified) = facts.modified else {
            return Standing::Unknown(
                "it lies elsewhere by now, and when it was last written to is not known".into(),
            );
        };
        let last = if said.in_flight == 0 { said.ended } else { said.ended.max(said.begun) + SOON };
        if modified > last {
            return Standing::Unknown(format!(
                "it lies in another file by now, which was written to {:.3} s after the server's last write: it was copied, \
                 before the server was killed or since, or something else has written to it",
                (modified - last) as f64 / 1e9
            ));
        }
        let seconds = modified % SECOND == 0 && said.floor.saturating_sub(modified) < SECOND;
        if seconds && modified < said.floor {
            return Standing::Unknown(
                "it lies in another file by now, which has the second of the server's last write and no finer time: it was \
                 copied before that or after it"
                    .into(),
            );
        }
        by_time(said, modified, facts)
    }
}

fn by_time(said: Testimony, modified: Wall, facts: &Facts) -> Standing {
    let not = |why: String| match facts.own_clock {
        true => Standing::Other(why),
        false => Standing::Unknown(format!("{why}, by the clock of another machine")),
    };
    let seconds = |nanos: Wall| format!("{:.3} s", nanos as f64 / 1e9);
    if modified.saturating_add(facts.step) < said.floor {
        let early = seconds(said.floor - modified);
        return not(format!(
            "its last write is {early} older than the server's: it was put back to an earlier state"
        ));
    }
    let pause = said
        .pause
        .filter(|(from, to)| modified > *from && modified.saturating_add(facts.step + TICK) < *to);
    if let Some((from, to)) = pause {
        let (after, before) = (seconds(modified - from), seconds(to - modified));
        return not(format!(
            "it was written to {after} after the server's last write but one, and {before} before the last, by something \
             else"
        ));
    }
    let last = if said.in_flight == 0 { said.ended } else { said.ended.max(said.begun) };
    let late = modified.saturating_sub(last);
    if late == 0 || said.in_flight > 0 && late <= SOON {
        return Standing::Same;
    }
    let why = format!("it was written to {} after the server's last write", seconds(late));
    if said.in_flight > 0 && late <= LATE {
        return Standing::Unknown(format!("{why}, of which {} were in flight", said.in_flight));
    }
    not(format!("{why}, by something else"))
}

fn by_count(said: Testimony, written: Option<u64>, direct: bool) -> Standing {
    let (begun, ended) = said.bytes;
    match written {
        // It writes whole pages, and each once for several writes.
        _ if !direct => Standing::Unknown(
            "how much was written to a device through the page cache cannot be told".into(),
        ),
        Some(written) if written > begun => Standing::Other(format!(
            "{} bytes were written to the device by something else",
            written - begun
        )),
        Some(written) if written >= ended => Standing::Same,
        _ => Standing::Unknown(
            "the kernel counts fewer bytes written to the device than the server wrote".into(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Wall = 1_790_000_000 * SECOND + 123_456_789;

    fn said(in_flight: u64) -> Testimony {
        Testimony {
            floor: NOW - 50,
            ended: NOW,
            begun: NOW + 10,
            in_flight,
            pause: None,
            bytes: (8192, 4096),
        }
    }

    fn is_other(standing: Standing) -> bool {
        matches!(standing, Standing::Other(_))
    }

    fn by(said: Testimony, modified: Wall, own_clock: bool) -> Standing {
        by_time(said, modified, &Facts { own_clock, ..Facts::default() })
    }

    #[test]
    fn times_between_which_the_last_write_lies() {
        for time in [NOW - 50, NOW - 1, NOW] {
            assert_eq!(by(said(0), time, true), Standing::Same);
        }
        for time in [0, NOW - 51, NOW - SECOND, NOW + 1, NOW + 5, NOW + 3600 * SECOND] {
            assert!(is_other(by(said(0), time, true)), "{time}");
            assert!(matches!(by(said(0), time, false), Standing::Unknown(_)), "{time}");
        }
        for time in [NOW + 10, NOW + 10 + SOON] {
            assert_eq!(by(said(1), time, true), Standing::Same);
        }
        let unsure = by(said(3), NOW + SOON + 11, true);
        assert!(matches!(&unsure, Standing::Unknown(why) if why.contains("3 were")), "{unsure:?}");
        assert!(is_other(by(said(1), NOW + 11 + LATE, true)));
    }

    /// The server wrote last a minute before the write that it was killed in.
    #[test]
    fn times_between_a_write_that_ended_and_the_next() {
        let begun = NOW + 60 * SECOND;
        let said = Testimony { begun, pause: Some((NOW, begun)), ..said(1) };
        for time in [NOW - 50, NOW, begun - TICK, begun, begun + SOON] {
            assert_eq!(by(said, time, true), Standing::Same, "{time}");
        }
        for time in [NOW - 51, NOW + 1, NOW + 30 * SECOND, begun - TICK - 1] {
            assert!(is_other(by(said, time, true)), "{time}");
            assert!(matches!(by(said, time, false), Standing::Unknown(_)), "{time}");
        }
        // Also where that has ended, and is not known to have put its stamp on the image.
        let ended = Testimony { ended: begun + 20, in_flight: 0, ..said };
        assert!(is_other(by(ended, NOW + 30 * SECOND, true)));
        for time in [NOW, begun, begun + 20] {
            assert_eq!(by(ended, time, true), Standing::Same, "{time}");
        }
        // An older server does not say it, and whole seconds not when within them.
        let older = Testimony { pause: None, ..said };
        assert_eq!(by(older, NOW + 30 * SECOND, true), Standing::Same);
        let coarse = Facts { step: SECOND, own_clock: true, ..Facts::default() };
        assert_eq!(by_time(said, begun - begun % SECOND, &coarse), Standing::Same);
        assert!(is_other(by_time(said, begun - begun % SECOND - 2 * SECOND, &coarse)));
    }

    #[test]
    fn a_copy_that_has_no_time_of_its_own_and_one_that_has() {
        let facts =
            |modified| Facts { modified: Some(modified), own_clock: true, ..Facts::default() };
        for time in [NOW - 50, NOW] {
            assert_eq!(Standing::of_copy(said(0), &facts(time)), Standing::Same);
        }
        assert!(is_other(Standing::of_copy(said(0), &facts(NOW - 51))));
        assert_eq!(Standing::of_copy(said(1), &facts(NOW + 10 + SOON)), Standing::Same);
        for (in_flight, time) in [(0, NOW + 1), (0, NOW + 3600 * SECOND), (1, NOW + 11 + SOON)] {
            let standing = Standing::of_copy(said(in_flight), &facts(time));
            assert!(matches!(standing, Standing::Unknown(_)), "{standing:?}");
        }
        // tar and scp keep whole seconds; one of a second before is an older copy.
        let second = NOW - NOW % SECOND;
        assert!(matches!(Standing::of_copy(said(0), &facts(second)), Standing::Unknown(_)));
        assert!(is_other(Standing::of_copy(said(0), &facts(second - SECOND))));
        let device = Facts { written: Some(4096), direct: true, ..Facts::default() };
        assert!(matches!(Standing::of_copy(said(0), &device), Standing::Unknown(_)));
    }

    #[test]
    fn file_systems_that_keep_whole_seconds() {
        let second = NOW - NOW % SECOND;
        let coarse = Facts { step: SECOND, own_clock: true, ..Facts::default() };
        assert_eq!(by_time(said(0), second, &coarse), Standing::Same);
        assert!(is_other(by_time(said(0), second - 3 * SECOND, &coarse)));
        // A time of whole seconds on a file system that keeps finer ones was put there.
        assert!(is_other(by(said(0), second, true)));
    }

    #[test]
    fn bytes_that_a_device_was_written() {
        for written in [4096, 5000, 8192] {
            assert_eq!(by_count(said(1), Some(written), true), Standing::Same);
        }
        assert!(is_other(by_count(said(1), Some(8193), true)));
        for (written, direct) in [(Some(4095), true), (None, true), (Some(8193), false)] {
            let standing = by_count(said(1), written, direct);
            assert!(matches!(standing, Standing::Unknown(_)), "{standing:?}");
        }
    }
}
