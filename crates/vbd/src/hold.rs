//! A device that is slower by a known share: each answer is held back for a part of the time that it took to serve. The lab
//! tries its own eyes on it; nobody else wants one.

use ringtap_io::{Io, Time};

/// For how much of its own service time an answer is held back.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hold {
    percent: u32,
}

impl Hold {
    pub(crate) fn new(percent: u32) -> Hold {
        Hold { percent }
    }

    #[inline]
    pub(crate) fn holds(self) -> bool {
        self.percent > 0
    }

    /// Hold back the answer to a request that took so long.
    #[cold]
    pub(crate) async fn back(self, io: &Io, took: Time) {
        io.sleep(took.saturating_mul(self.percent.into()) / 100).await;
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use ringtap_image::{CacheMode, Container, Raw, Traits};
    use ringtap_io::{File, Key, Op, Reactor, Tasks, Time};

    use crate::{Kind, Request, Vbd};

    /// A disk of which every read takes ten microseconds, and a sleep what it is told.
    struct Steady(Time);

    impl Reactor for Steady {
        fn turn(
            &mut self,
            submit: &mut Vec<(Key, Op)>,
            done: &mut Vec<(Key, i32)>,
            _: bool,
        ) -> io::Result<()> {
            for (key, op) in submit.drain(..) {
                let (takes, result) = match op {
                    Op::Read { mem, .. } => (10_000, mem.len() as i32),
                    Op::Timeout { nanos } => (nanos, -libc::ETIME),
                    _ => (0, 0),
                };
                self.0 += takes;
                done.push((key, result));
            }
            Ok(())
        }

        fn now(&self) -> Time {
            self.0
        }
    }

    /// How long a read of a device takes by its own account.
    fn takes(percent: u32) -> Time {
        let mut tasks = Tasks::new(Box::new(Steady(0)));
        let io = tasks.io().clone();
        let container = Container::simulated(File::from_parts(0, 0), 1 << 20, Traits::FILE);
        let vbd = Vbd::new(Box::new(Raw::new(container)), CacheMode::None).held_back(percent);
        let served = tasks.block_on(async move {
            let (buffer, began) = (io.buffer(4096).expect("memory"), io.now());
            let (offset, len) = (0, 4096);
            let request = Request { kind: Kind::Read, offset, len, mem: buffer.mem(), fua: false };
            vbd.fork().serve(&io, request).await.expect("served");
            io.now() - began
        });
        served.expect("nothing fails")
    }

    #[test]
    fn a_fifth_more_is_a_fifth_more() {
        assert_eq!([0, 20].map(takes), [10_000, 12_000]);
    }
}
