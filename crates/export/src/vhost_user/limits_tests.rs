//! What a guest can make its server hold, and how busy it can keep it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ringtap_image::{
    Boxed, CacheMode, Discard, Error, Extent, Format, Image, Info, Null, OpenOptions, Status,
};
use ringtap_io::{Io, Op, OpenFile};
use ringtap_vbd::Vbd;
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN};

use super::chains::*;
use super::queue::BUDGET;
use super::testing::{GUEST, GuestRing};
use super::thread_tests::*;

/// A disk whose requests stay in flight while their guest is held.
struct Held(Null, Arc<Hold>);

#[derive(Default)]
struct Hold {
    /// Requests that have begun, and how many may end.
    begun: AtomicUsize,
    may_end: AtomicUsize,
}

impl Held {
    async fn load_when_let(&self, io: &Io) -> Result<(), Error> {
        let number = self.1.begun.fetch_add(1, SeqCst);
        while self.1.may_end.load(SeqCst) <= number {
            io.run(Op::Timeout { nanos: 1_000_000 }).await;
        }
        // There is nothing to be read; that ends it.
        Err(Error::Os(libc::EIO))
    }
}

impl Image for Held {
    fn info(&self) -> &Info {
        self.0.info()
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(Held(self.0.clone(), self.1.clone()))
    }

    fn map(&self, _: u64, _: u64) -> Extent<'_> {
        Extent::NotLoaded
    }

    fn load<'a>(&'a self, io: &'a Io, _: u64) -> Boxed<'a, Result<(), Error>> {
        Box::pin(self.load_when_let(io))
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        self.0.flush(io)
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        self.0.discard(io, offset, len, mode)
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        self.0.status(io, offset, len)
    }

    fn current_size(&self) -> Result<u64, Error> {
        self.0.current_size()
    }
}

fn held(hold: &Arc<Hold>) -> Vbd {
    Vbd::new(Box::new(Held(Null::new(1 << 40, false), hold.clone())), CacheMode::None)
}

/// Where the table of [`serve_repeated`] lies.
const TABLES: u64 = HEADER + 0x200;

/// Serve the guest's ring of chains that all are one indirect table, which names `times` the same `each` bytes.
fn serve_repeated(guest: &GuestRing, [times, each]: [u32; 2], skip: u64, vbd: Vbd) -> Served {
    let mut inner = vec![Entry(HEADER, 16, NEXT, 1)];
    inner.extend((0..times).map(|n| Entry(SCATTERED + skip, each, NEXT | WRITE, n as u16 + 2)));
    inner.push(Entry(STATUS, 1, WRITE, 0));
    let inner = table(&inner);
    let outer = Entry(TABLES, inner.len() as u32, INDIRECT, 0);
    guest.write(GUEST, &with_header(&[outer], VIRTIO_BLK_T_IN));
    guest.write(TABLES, &inner);
    let pages = File::from(memfd_create("pages", MemfdFlags::CLOEXEC).expect("memfd"));
    let memory = with_pages(guest, &pages);
    serve(guest, &memory, vbd)
}

/// Of 300 such chains in a ring of 512, so many are in flight at a time.
fn in_flight_at_a_time(times: u32, each: u32) -> usize {
    const CHAINS: usize = 300;
    let guest = GuestRing::new(&[], 512, &[0; CHAINS]);
    let hold = Arc::new(Hold::default());
    let served = serve_repeated(&guest, [times, each], 0, held(&hold));
    let settled = |least: usize| {
        let began = Instant::now();
        let mut seen = usize::MAX;
        // Nothing tells that no more is begun but that none is for a while.
        while hold.begun.load(SeqCst) < least || seen != hold.begun.load(SeqCst) {
            assert!(began.elapsed() < Duration::from_secs(60), "no more is begun");
            seen = hold.begun.load(SeqCst);
            std::thread::sleep(Duration::from_millis(200));
        }
        seen
    };
    let at_first = settled(1);
    hold.may_end.store(1, SeqCst);
    let one_later = settled((at_first + 1).min(CHAINS));
    assert!(one_later <= at_first + 1, "{at_first}, then {one_later}");
    hold.may_end.store(CHAINS, SeqCst);
    let (told, ended) = channel();
    while usize::from(guest.used()) < CHAINS {
        wait_for(&served.call);
    }
    std::thread::spawn(move || told.send(served.thread.stop().expect("it ends")));
    assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(CHAINS as u16));
    at_first
}

#[test]
fn a_ring_holds_so_many_bytes_and_one_larger_request_alone() {
    let (kib, mib) = (1 << 10, 1 << 20);
    let most = BUDGET / mib as usize;
    let count = in_flight_at_a_time(16, 64 * kib);
    assert!((most / 2..=most).contains(&count), "{count} MiB at a time");
    assert_eq!(in_flight_at_a_time(2, 16 * kib), 300, "a guest of the usual kind is not held up");
    assert_eq!(in_flight_at_a_time(10, 2 * mib), most / 20);
    assert_eq!(in_flight_at_a_time(100, 2 * mib), 1);
}

#[test]
fn what_is_held_back_is_served_before_the_end() {
    let guest = GuestRing::new(&[], 64, &[0; 40]);
    let hold = Arc::new(Hold::default());
    let served = serve_repeated(&guest, [40, 2 << 20], 0, held(&hold));
    let began = Instant::now();
    while hold.begun.load(SeqCst) == 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "nothing is begun");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (told, ended) = channel();
    std::thread::spawn(move || told.send(served.thread.stop().expect("it ends")));
    hold.may_end.store(40, SeqCst);
    let reached = ended.recv_timeout(Duration::from_secs(60)).expect("it ends");
    // Nothing that was taken from the ring is left without an answer.
    assert_eq!(guest.used(), reached);
}

/// The most memory this process has had, in MiB.
fn most_resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("the status");
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("VmHWM") >> 10
}

/// Runs this test again in a process of its own, whose memory is looked at.
#[test]
fn a_ring_of_requests_that_are_not_aligned_takes_no_more_memory() {
    const CHILD: &str = "RINGTAP_TEST_HELD";
    let name = "vhost_user::limits_tests::\
                a_ring_of_requests_that_are_not_aligned_takes_no_more_memory";
    if std::env::var_os(CHILD).is_none() {
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", name, "--nocapture", "--test-threads", "1"])
            .env(CHILD, "1")
            .output()
            .expect("the test again");
        let said = String::from_utf8_lossy(&output.stdout);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{said}{error}");
        return;
    }
    const CHAINS: u16 = 400;
    // Not in /tmp, which may be a tmpfs: O_DIRECT is what is meant.
    let dir = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![7; 4 << 20]).expect("a file");
    let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
    let image = ringtap_image::open(&path, &options).expect("it opens");
    let guest = GuestRing::new(&[], 512, &[0; CHAINS as usize]);
    let before = most_resident();
    let vbd = Vbd::new(image, CacheMode::None);
    let served = serve_repeated(&guest, [16, 64 << 10], 1, vbd.fork());
    while guest.used() < CHAINS {
        wait_for(&served.call);
    }
    served.thread.stop().expect("it ends");
    assert_eq!(vbd.stats().bounced_bytes, u64::from(CHAINS) << 20);
    let held = most_resident() - before;
    assert!(held < (BUDGET as u64 >> 20) + 16, "{held} MiB");
}

/// CPU time of a queue that has nothing to do for two seconds.
fn idle_cpu_time(kick: OwnedFd) -> Duration {
    let guest = GuestRing::new(&[], 16, &[]);
    let (vbd, kick) = (nothing(), Arc::new(OpenFile::new(kick)));
    let served = serve_by(&guest, &guest.memory, vbd.fork(), kick, event());
    std::thread::sleep(Duration::from_secs(2));
    served.thread.stop().expect("it ends");
    Duration::from_nanos(vbd.stats().cpu_ns)
}

#[test]
fn a_kick_that_never_ends_costs_no_processor() {
    let semaphore = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).expect("a count");
    rustix::io::write(&semaphore, &(1u64 << 60).to_ne_bytes()).expect("a large one");
    let clock = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).expect("a timer");
    let nanosecond = Timespec { tv_sec: 0, tv_nsec: 1 };
    let often = Itimerspec { it_interval: nanosecond, it_value: nanosecond };
    timerfd_settime(&clock, TimerfdTimerFlags::empty(), &often).expect("it runs");
    let (full, _other) = full_pipe();
    let zeros = File::open("/dev/zero").expect("it is everywhere").into();
    for (kick, name) in
        [(semaphore, "a count"), (clock, "a timer"), (full, "a pipe"), (zeros, "zeros")]
    {
        let spent = idle_cpu_time(kick);
        assert!(spent < Duration::from_millis(200), "{name}: {spent:?}");
    }
}

#[test]
fn a_guest_that_kicks_for_each_request_is_always_heeded() {
    let chain = [Entry(HEADER, 16, NEXT, 1), Entry(STATUS, 1, WRITE, 0)];
    let guest = GuestRing::new(&with_header(&chain, VIRTIO_BLK_T_FLUSH), 16, &[]);
    let (vbd, kick) = (nothing(), event());
    let served = serve_by(&guest, &guest.memory, vbd.fork(), kick.clone(), event());
    // As many in vain as there may be, and more.
    for _ in 0..200 {
        signal(&kick);
        std::thread::sleep(Duration::from_micros(200));
    }
    for _ in 0..200 {
        served.ask(&guest);
    }
    assert_eq!(served.thread.stop().expect("it ends"), 200);
}

#[test]
fn memory_that_is_cut_short_stops_the_queue_that_uses_it() {
    let read = [
        Entry(HEADER, 16, NEXT, 1),
        Entry(SCATTERED, 4096, NEXT | WRITE, 2),
        Entry(STATUS, 1, WRITE, 0),
    ];
    let guest = GuestRing::new(&with_header(&read, VIRTIO_BLK_T_IN), 16, &[]);
    let pages = File::from(memfd_create("pages", MemfdFlags::CLOEXEC).expect("memfd"));
    let memory = with_pages(&guest, &pages);
    let (vbd, kick, error) = (nothing(), event(), event());
    let served = serve_by(&guest, &memory, vbd.fork(), kick, error.clone());
    served.ask(&guest);
    // The ring and the status lie elsewhere: all but the data is whole.
    ftruncate(&pages, 0).expect("cut");
    served.ask(&guest);
    wait_for(&error);
    let used = guest.used();
    guest.make_available(0);
    assert_eq!(served.thread.stop().expect("it ends"), used, "nothing is taken any more");
}
