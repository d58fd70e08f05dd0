//! Runs of zeros, and of bytes that are the same in two buffers.

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // So much at once is looked at without a branch, in vectors.
    let blocks = bytes.chunks_exact(256);
    let rest = blocks.remainder();
    let none = |block: &[u8]| block.iter().fold(0, |all, byte| all | byte) == 0;
    let mut blocks = blocks;
    blocks.all(none) && none(rest)
}

/// A part of a buffer, and whether it is of the kind looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) chosen: bool,
}

/// Cut `len` bytes into runs, grain by grain: neighbours that `choose` says the same of are one.
pub(crate) fn runs(
    len: usize,
    grain: usize,
    choose: impl Fn(std::ops::Range<usize>) -> bool,
) -> impl Iterator<Item = Run> {
    let mut at = 0;
    let mut ahead = None;
    std::iter::from_fn(move || {
        let take = |at: usize| {
            let to = at.saturating_add(grain).min(len);
            (at < len).then(|| Run { from: at, to, chosen: choose(at..to) })
        };
        let mut run = ahead.take().or_else(|| take(at))?;
        loop {
            at = run.to;
            match take(at) {
                Some(next) if next.chosen == run.chosen => run.to = next.to,
                next => {
                    ahead = next;
                    return Some(run);
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_told_from_all_else() {
        for len in [0, 1, 255, 256, 257, 4096, 5000] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for at in [0, len / 2, len.saturating_sub(1)] {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = 1;
                    assert!(!is_zero(&bytes), "{len} {at}");
                    bytes[at] = 0;
                }
            }
        }
    }

    #[test]
    fn runs_cover_everything_once() {
        let marks = [true, true, false, true, false, false, false];
        for len in 1..=marks.len() * 4 {
            let found: Vec<Run> = runs(len, 4, |range| marks[range.start / 4]).collect();
            let mut at = 0;
            for run in &found {
                assert_eq!(run.from, at);
                assert!((run.from..run.to).all(|byte| marks[byte / 4] == run.chosen));
                at = run.to;
            }
            assert_eq!(at, len);
            assert!(found.windows(2).all(|pair| pair[0].chosen != pair[1].chosen));
        }
    }
}
