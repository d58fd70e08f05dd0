//! The same done to many, on a few threads: most of what images take to open and to close is waiting, for disks and for the
//! broker.

use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, scope};

use ringtap_io::keeping_a_reactor;

/// So many threads at most. More would have rings made that are used once.
pub(crate) const AT_ONCE: usize = 16;

/// Do it to each; what came of them, in order. Where no more threads can be had, those that there are do all.
pub(crate) fn at_once<T: Send, R: Send>(all: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let threads = all.len().clamp(1, AT_ONCE);
    let left = Mutex::new(all.into_iter().enumerate());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || {
        let mut done = vec![];
        keeping_a_reactor(|| {
            while let Some((number, one)) = next() {
                done.push((number, work(one)));
            }
        });
        done
    };
    let mut done = scope(|scope| {
        let others = (1..threads).map_while(|_| Builder::new().spawn_scoped(scope, run).ok());
        let others: Vec<_> = others.collect();
        let mut done = run();
        for thread in others {
            done.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, end)| end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_done_once_and_told_of_in_order() {
        for count in [0, 1, AT_ONCE, 10 * AT_ONCE] {
            let all: Vec<usize> = (0..count).collect();
            let slow_first = |number: usize| {
                std::thread::sleep(std::time::Duration::from_micros((count - number) as u64));
                number
            };
            assert_eq!(at_once(all.clone(), slow_first), all);
        }
    }
}
