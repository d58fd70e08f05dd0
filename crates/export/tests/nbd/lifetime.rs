//! Stopping: what was taken ends, what was acknowledged is there.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ringtap_export::Stop;
use ringtap_export::nbd::Limits;
use ringtap_export::nbd::wire::{cmd, cmd_flag, errno};
use ringtap_image::{Boxed, Discard, Error, Extent, Image, Info, Status};
use ringtap_io::Io;
use ringtap_vbd::{Rate, Rates};

use crate::harness::{How, direct, image, open, run, sparse};
use crate::raw::{Raw, Reply, request};

/// Whoever is gone has written what was carried out, and nothing later.
#[test]
fn what_limits_hold_of_a_lost_connection_is_not_written_over_what_comes_after() {
    let total = Rate { average: 10, ..Rate::default() };
    let iops = Rates { total, ..Rates::default() };
    for nonsense in [false, true] {
        let served = sparse(1 << 20, How::default());
        served.vbd.set_limits(ringtap_vbd::Limits { iops, ..Default::default() });
        let mut lost = Raw::transmit(&served.socket);
        let last = 39 * 4096;
        for block in 0..40u64 {
            let mut bytes = request(cmd::WRITE, 0, block, block * 4096, 4096);
            bytes.extend([b'o'; 4096]);
            lost.send(&bytes);
        }
        if nonsense {
            lost.send(&[0xff; 64]);
        }
        assert_eq!(lost.reply(), Reply::Simple { error: 0, cookie: 0 });
        drop(lost);
        let mut next = Raw::transmit(&served.socket);
        let mut bytes = request(cmd::WRITE, 0, 1, last, 4096);
        bytes.extend([b'n'; 4096]);
        next.send(&bytes);
        assert_eq!(next.reply(), Reply::Simple { error: 0, cookie: 1 });
        next.send(&request(cmd::FLUSH, 0, 2, 0, 0));
        assert_eq!(next.reply(), Reply::Simple { error: 0, cookie: 2 });
        served.vbd.set_limits(ringtap_vbd::Limits::default());
        // All that was asked has ended, one way or the other.
        while served.vbd.stats().write.ended + served.vbd.stats().write.failed < 41 {
            std::thread::sleep(Duration::from_millis(10));
        }
        next.send(&request(cmd::READ, 0, 3, last, 1));
        assert_eq!(next.take(17)[16], b'n', "after nonsense: {nonsense}");
    }
}

/// A client of the export of that name.
fn chosen(socket: &Path, name: u8) -> Raw {
    let mut stream = UnixStream::connect(socket).expect("the socket");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    stream.read_exact(&mut [0; 18]).expect("a greeting");
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x01").expect("sent");
    stream.write_all(&[name]).expect("sent");
    stream.read_exact(&mut [0; 10]).expect("the export");
    Raw(stream)
}

#[test]
fn an_export_is_withdrawn_from_its_clients_alone() {
    use ringtap_export::nbd::{Listener, NamedExport, Server};
    let dir = tempfile::tempdir().expect("a folder");
    let socket = dir.path().join("nbd");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let export = |name: &str| NamedExport {
        name: name.into(),
        description: String::new(),
        vbd: ringtap_vbd::Vbd::new(
            Box::new(ringtap_image::Null::new(1 << 20, false)),
            Default::default(),
        )
        .into(),
    };
    let exports = vec![export("a"), export("b")];
    let gone = exports[0].vbd.downgrade();
    let server = Arc::new(Server::new(vec![Listener::Unix(listener)], exports));
    let (stop, theirs) = (Stop::new().expect("an eventfd"), server.clone());
    let stopped = stop.clone();
    let thread = std::thread::spawn(move || theirs.serve(&stopped));
    let (a, b) = (chosen(&socket, b'a'), chosen(&socket, b'b'));
    let asks = |raw: &Raw| {
        let answered = (&raw.0).write_all(&request(cmd::READ, 0, 1, 0, 512)).is_ok();
        let mut reply = vec![0; 16 + 512];
        answered && (&raw.0).read_exact(&mut reply).is_ok()
    };
    assert!(asks(&a) && asks(&b));
    while (server.users("a"), server.users("b")) != (1, 1) {}
    assert!(server.withdraw("c").is_none());
    server.withdraw("a").expect("it is there").wait();
    assert!(!asks(&a) && asks(&b));
    assert_eq!((server.users("a"), server.users("b")), (0, 1));
    assert!(gone.upgrade().is_none(), "nothing of it is held");
    assert!(server.withdraw("a").is_none());
    stop.raise();
    thread.join().expect("its thread").expect("it serves");
}

#[test]
fn stopping_under_load_drains_and_lets_go_of_the_image() {
    for how in [How::default(), direct()] {
        let mut served = sparse(64 << 20, how);
        let stopped = AtomicBool::new(false);
        let acknowledged = std::thread::scope(|scope| {
            // The clients end with the server, also where an assertion fails.
            let _ending = Ending(served.stop.clone());
            let clients: Vec<_> = (0..3u64)
                .map(|client| {
                    let mut raw = Raw::transmit(&served.socket);
                    let mut writer = raw.0.try_clone().expect("a descriptor");
                    let stopped = &stopped;
                    let base = client * 4096;
                    scope.spawn(move || {
                        for i in 0..u64::MAX {
                            // 4 KiB writes and, now and then, a large one; each block once.
                            let block = base + i % 4096;
                            let mut bytes = request(cmd::WRITE, 0, block, block * 4096, 4096);
                            bytes.extend(block.to_be_bytes().repeat(512));
                            if writer.write_all(&bytes).is_err() {
                                return;
                            }
                        }
                    });
                    scope.spawn(move || {
                        let (mut good, mut late) = (vec![], 0);
                        let mut first = [0; 1];
                        while matches!(std::io::Read::read(&mut &raw.0, &mut first), Ok(1)) {
                            let rest = raw.take(15);
                            let error = u32::from_be_bytes(rest[3..7].try_into().expect("four"));
                            let block = u64::from_be_bytes(rest[7..].try_into().expect("eight"));
                            match error {
                                0 => good.push(block),
                                errno::ESHUTDOWN => late += 1,
                                other => panic!("error {other}"),
                            }
                        }
                        assert!(stopped.load(SeqCst), "closed before the stop");
                        (good, late)
                    })
                })
                .collect();
            // In the middle of it, however slow the machine is.
            let began = Instant::now();
            while served.vbd.stats().write.ended <= 200 {
                assert!(began.elapsed() < Duration::from_secs(60), "the clients are not served");
                std::thread::sleep(Duration::from_millis(5));
            }
            std::thread::sleep(Duration::from_millis(100));
            let began = Instant::now();
            stopped.store(true, SeqCst);
            served.stop();
            assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
            clients.into_iter().map(|client| client.join().expect("a client")).collect::<Vec<_>>()
        });
        // Exactly what the server ended was acknowledged.
        let good: usize = acknowledged.iter().map(|(good, _)| good.len()).sum();
        let stats = served.vbd.stats();
        assert!(good > 100, "{good}");
        assert_eq!(good as u64, stats.write.ended);
        let content = served.content();
        for block in acknowledged.iter().flat_map(|(good, _)| good) {
            let bytes = &content[*block as usize * 4096..][..4096];
            assert_eq!(bytes, block.to_be_bytes().repeat(512), "block {block}");
        }
        // The socket takes nobody any more, and the image is free for the next.
        let disk = served.disk.clone();
        drop(std::mem::replace(&mut served.vbd, vbd_of_nothing()));
        let began = Instant::now();
        run("qemu-io", &["-fraw", "-c", "write 0 512", disk.to_str().expect("UTF-8")]);
        assert!(began.elapsed() < Duration::from_secs(10));
        open(&disk, &how);
    }
}

struct Ending(Stop);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.raise();
    }
}

fn vbd_of_nothing() -> ringtap_vbd::Disk {
    let how = How::default();
    let image = open(std::path::Path::new("null:1M"), &how);
    ringtap_vbd::Disk::from(ringtap_vbd::Vbd::new(image, how.cache))
}

#[test]
fn requests_that_come_after_the_stop_are_told() {
    let mut served = sparse(1 << 20, How::default());
    // A client that rests, one within its handshake, one in the middle of a payload.
    let mut resting = Raw::transmit(&served.socket);
    let mut shaking = Raw::connect(&served.socket);
    let mut paying = Raw::transmit(&served.socket);
    paying.send(&request(cmd::WRITE, 0, 1, 0, 4096));
    paying.send(&[0xff; 1000]);
    std::thread::sleep(Duration::from_millis(100));
    let began = Instant::now();
    served.stop();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(resting.is_closed() && shaking.is_closed() && paying.is_closed());
    assert!(served.content().iter().all(|byte| *byte == 0));
    assert_eq!(served.vbd.stats().flush.failed, 0);
}

#[test]
fn a_client_that_takes_no_replies_does_not_hold_up_the_stop_for_long() {
    let limits = Limits { drain: Duration::from_millis(500), ..Limits::default() };
    let mut served = sparse(64 << 20, How { limits, ..How::default() });
    let mut deaf = Raw::transmit(&served.socket);
    for cookie in 0..100 {
        deaf.send(&request(cmd::READ, 0, cookie, 0, 1 << 20));
    }
    std::thread::sleep(Duration::from_millis(200));
    let began = Instant::now();
    let took = std::thread::scope(|scope| {
        let stopping = scope.spawn(|| served.stop());
        while !stopping.is_finished() && began.elapsed() < Duration::from_secs(8) {
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(deaf);
        began.elapsed()
    });
    assert!(took >= Duration::from_millis(400) && took < Duration::from_secs(5), "{took:?}");
}

/// An image that counts how often it is flushed, and that no write is stable in before.
struct Counted {
    image: Box<dyn Image>,
    flushes: Arc<AtomicU64>,
}

impl Image for Counted {
    fn info(&self) -> &Info {
        self.image.info()
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(Counted { image: self.image.fork(), flushes: self.flushes.clone() })
    }

    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        self.image.map(offset, len)
    }

    fn is_dirty(&self) -> bool {
        true
    }

    fn flush<'a>(&'a self, io: &'a Io) -> Boxed<'a, Result<(), Error>> {
        self.flushes.fetch_add(1, SeqCst);
        self.image.flush(io)
    }

    fn discard<'a>(
        &'a self,
        io: &'a Io,
        offset: u64,
        len: u64,
        mode: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        self.image.discard(io, offset, len, mode)
    }

    fn status<'a>(&'a self, io: &'a Io, offset: u64, len: u64) -> Boxed<'a, Result<Status, Error>> {
        self.image.status(io, offset, len)
    }

    fn current_size(&self) -> Result<u64, Error> {
        self.image.current_size()
    }
}

#[test]
fn what_asks_for_durability_is_flushed_and_so_is_the_stop() {
    let flushes = Arc::new(AtomicU64::new(0));
    let null = open(std::path::Path::new("null:1M"), &How::default());
    let counted = Counted { image: null, flushes: flushes.clone() };
    let mut served = image(Box::new(counted), How::default());
    let mut raw = Raw::transmit(&served.socket);
    for (kind, flags, expect) in [
        (cmd::TRIM, 0, 0),
        (cmd::TRIM, cmd_flag::FUA, 1),
        (cmd::WRITE_ZEROES, 0, 1),
        (cmd::WRITE_ZEROES, cmd_flag::FUA, 2),
        (cmd::FLUSH, 0, 3),
        (cmd::FLUSH, cmd_flag::FUA, 4),
        (cmd::WRITE, 0, 4),
        (cmd::WRITE, cmd_flag::FUA, 5),
    ] {
        let len = if kind == cmd::FLUSH { 0 } else { 65536 };
        raw.send(&request(kind, flags, 1, 0, len));
        if kind == cmd::WRITE {
            raw.send(&vec![7; len as usize]);
        }
        assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 1 });
        assert_eq!(flushes.load(SeqCst), expect, "{kind} {flags}");
    }
    served.stop();
    assert_eq!(flushes.load(SeqCst), 6);
}

#[test]
fn what_is_to_be_cached_is_read() {
    for (how, read) in [(How::default(), 1 << 20), (direct(), 0)] {
        let served = sparse(4 << 20, how);
        let mut raw = Raw::transmit(&served.socket);
        raw.send(&request(cmd::CACHE, 0, 1, 1 << 20, 1 << 20));
        assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 1 });
        // Under O_DIRECT there is no cache to bring anything into.
        assert_eq!(served.vbd.stats().read.bytes, read);
    }
}

#[test]
fn two_exports_by_their_names() {
    let served = sparse(1 << 20, How::default());
    for name in ["disk", "same"] {
        let uri = served.uri().replace("///?", &format!("///{name}?"));
        let size = run("nbdinfo", &["--size", &uri]);
        assert_eq!(size.trim(), "1048576");
    }
    let mut raw = Raw::transmit(&served.socket);
    raw.send(&request(cmd::FLUSH, 0, 3, 0, 0));
    assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 3 });
}
