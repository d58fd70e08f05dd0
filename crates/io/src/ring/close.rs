//! A ring that is closed while drivers still have commands of it: that ends them.

use std::io;

use super::Ring;
use crate::{Key, Op};

impl Ring {
    /// Have the kernel begin on all that is listed, and ask for no completion: what a driver has for a command afterwards
    /// it keeps, and takes back as the ring is closed.
    pub(super) fn hand_over_last(&mut self, submit: &mut Vec<(Key, Op)>) -> io::Result<()> {
        if !self.deferred {
            // Completions would come at any system call of this thread.
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.hand_over(submit, &mut vec![])?;
        loop {
            let mut queue = self.ring.submission();
            queue.sync();
            let waiting = queue.len() as u32;
            drop(queue);
            if waiting == 0 {
                return Ok(());
            }
            // SAFETY: every entry names memory that its task keeps valid until completion, as in `enter`; no argument is
            // given.
            let entered = unsafe { self.ring.submitter().enter::<()>(waiting, 0, 0, None) };
            match entered {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::{OpenFile, Tasks};

    #[test]
    fn a_closed_ring_has_begun_on_all_and_ends_what_is_in_flight() {
        let event = || OpenFile::new(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
        let (silent, told) = (event(), event());
        let mut tasks = Tasks::new(Box::new(Ring::new().expect("io_uring")));
        let ends: Rc<[Cell<i32>; 3]> = Rc::default();
        let files = [
            (0, Op::PollIn { file: silent.handle() }),
            (1, Op::SignalEvent { file: told.handle() }),
        ];
        for (index, op) in files {
            let (io, ends) = (tasks.io().clone(), ends.clone());
            tasks.spawn(async move { ends[index].set(io.run(op).await) });
            tasks.run_ready();
            if index == 0 {
                tasks.turn(false).expect("the ring");
            }
        }
        // SAFETY: neither touches memory of this process but the word that is written, which is static.
        unsafe { tasks.close() }.expect("closed");
        assert_eq!(rustix::io::read(&told, &mut [0; 8]), Ok(8));
        tasks.run_ready();
        assert_eq!((tasks.count(), tasks.io().in_flight()), (0, 0));
        let (io, theirs, file) = (tasks.io().clone(), ends.clone(), silent.handle());
        tasks.spawn(async move { theirs[2].set(io.run(Op::PollIn { file }).await) });
        tasks.run().expect("nothing waits");
        assert_eq!([0, 1, 2].map(|index| ends[index].get()), [-libc::ENODEV; 3]);
    }
}
