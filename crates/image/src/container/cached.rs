//! Pages of images that others have left in the page cache: dropped behind the backs of those who open them.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ringtap_io::OpenFile;
use rustix::fs::{Advice, fadvise};

/// A file at which it has been so long holds up no other.
const LONG: Duration = Duration::from_secs(1);

/// The files whose pages are to be dropped, and the thread that does it as long as there are any.
static QUEUE: Mutex<Queue> = Mutex::new(Queue { files: VecDeque::new(), at_work: None, last: 0 });

struct Queue {
    files: VecDeque<File>,
    /// The number of the thread, and since when it has been at its file.
    at_work: Option<(u64, Instant)>,
    last: u64,
}

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where pages of the file are cached, the kernel passes each write on to a worker that takes them away
/// first. Pages that have not been written yet hold up who drops them for as long as that takes, so
/// nobody waits for it; and the file is opened once more, for a copy of the descriptor would keep its
/// locks. That they cannot be dropped is not worth a word.
pub(super) fn drop_cached_pages(file: &OpenFile) {
    let again = File::open(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()));
    let Ok(again) = again else { return };
    let mut queue = queue();
    queue.files.push_back(again);
    if queue.at_work.is_some_and(|(_, since)| since.elapsed() < LONG) {
        return;
    }
    queue.last += 1;
    let number = queue.last;
    queue.at_work = Some((number, Instant::now()));
    drop(queue);
    if thread::Builder::new().name("drop cached".into()).spawn(move || drop_all(number)).is_err() {
        let mut queue = self::queue();
        queue.files.clear();
        queue.at_work = None;
    }
}

fn drop_all(number: u64) {
    loop {
        let mut queue = queue();
        // Another has gone on where one file has taken this one too long.
        if queue.at_work.is_none_or(|(at_work, _)| at_work != number) {
            return;
        }
        let Some(file) = queue.files.pop_front() else {
            queue.at_work = None;
            return;
        };
        queue.at_work = Some((number, Instant::now()));
        drop(queue);
        let _ = fadvise(&file, 0, None, Advice::DontNeed);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::IoSliceMut;

    use rustix::io::{Errno, ReadWriteFlags, preadv2};

    use super::*;

    fn is_cached(file: &File) -> bool {
        let mut bytes = [0; 512];
        let read = preadv2(file, &mut [IoSliceMut::new(&mut bytes)], 0, ReadWriteFlags::NOWAIT);
        read != Err(Errno::AGAIN)
    }

    #[test]
    fn pages_of_all_files_are_dropped_one_after_the_other() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
        for round in 0..3 {
            let files: Vec<File> = (0..20)
                .map(|number| {
                    let path = dir.path().join(format!("{round}-{number}"));
                    fs::write(&path, [7; 1 << 16]).expect("a file");
                    let file = File::open(path).expect("the file");
                    file.sync_all().expect("stable");
                    file
                })
                .collect();
            assert!(files.iter().all(is_cached), "nothing is to be dropped");
            for file in &files {
                let open = OpenFile::new(file.try_clone().expect("a copy").into());
                drop_cached_pages(&open);
            }
            let end = Instant::now() + Duration::from_secs(30);
            while queue().at_work.is_some() {
                assert!(Instant::now() < end, "its thread stays, with nothing to do");
                thread::sleep(Duration::from_millis(1));
            }
            // Once: who asks for what is not cached has the kernel read it ahead.
            let stay = files.iter().filter(|file| is_cached(file)).count();
            assert!(stay <= 2, "pages of {stay} files stay");
        }
    }
}
