//! What one client may take, and that the others do not notice.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ringtap_export::nbd::Limits;
use ringtap_export::nbd::wire::cmd;
use rustix::net::{AddressFamily, SocketType, bind, connect, socket, sockopt};

use crate::harness::{How, Served, direct, file, pattern, sparse, try_run};
use crate::raw::{Raw, Reply, request};

const MIB: usize = 1 << 20;

fn with(limits: Limits) -> How {
    How { limits, ..How::default() }
}

/// A connection over TCP that comes from 127.0.0.`host`, with little room for what it does not read.
fn from(served: &Served, host: u8) -> UnixStream {
    let stream = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    sockopt::set_socket_recv_buffer_size(&stream, 4096).expect("a small buffer");
    let here = std::net::SocketAddrV4::new([127, 0, 0, host].into(), 0);
    bind(&stream, &here).expect("an address of this host");
    let there = std::net::SocketAddrV4::new([127, 0, 0, 1].into(), served.port);
    connect(&stream, &there).expect("a connection");
    // It is a stream like any other.
    UnixStream::from(stream)
}

fn reads_back(raw: &mut Raw, offset: u64, len: usize) -> Vec<u8> {
    raw.send(&request(cmd::READ, 0, 9, offset, len as u32));
    assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 9 });
    raw.take(len)
}

#[test]
fn idle_clients_of_one_host_do_not_lock_others_out() {
    let served = sparse(1 << 20, How::default());
    let idle: Vec<_> = (0..300).map(|_| Raw::greet(from(&served, 1))).collect();
    let mut idle: Vec<_> = idle.into_iter().flatten().collect();
    idle.iter_mut().take(100).for_each(Raw::choose);
    let mut other = Raw::greet(from(&served, 2)).expect("a greeting");
    other.choose();
    assert_eq!(reads_back(&mut other, 0, 16), [0; 16]);
    // Nor do they at another socket.
    let mut local = Raw::transmit(&served.socket);
    assert_eq!(reads_back(&mut local, 0, 16), [0; 16]);
    assert!(!Raw::is_let_in(from(&served, 1)), "the host has all it may have");
}

#[test]
fn idle_clients_of_one_user_do_not_lock_others_out() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can be another user");
        return;
    }
    let served = sparse(1 << 20, How::default());
    let folder = served.socket.parent().expect("a folder");
    for (path, mode) in [(folder, 0o755), (&*served.socket, 0o666)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
    }
    let connect = || UnixStream::connect(&served.socket).expect("a connection");
    let idle: Vec<_> = (0..300).map(|_| Raw::greet(connect())).collect();
    let size = ["--reuid=65534", "--regid=65534", "--clear-groups", "nbdinfo", "--size"];
    let other = try_run("setpriv", &[&size[..], &[&served.uri()]].concat(), "");
    assert!(other.status.success(), "{}", String::from_utf8_lossy(&other.stderr));
    assert!(!Raw::is_let_in(connect()));
    drop(idle);
}

/// Bytes of memory of this process.
fn resident() -> usize {
    let text = fs::read_to_string("/proc/self/statm").expect("/proc");
    let pages = text.split(' ').nth(1).and_then(|word| word.parse::<usize>().ok());
    pages.expect("a number") * 4096
}

/// Run this very test in a process of its own, whose memory is that of nothing else; true in there.
fn is_alone(name: &str) -> bool {
    const ALONE: &str = "RINGTAP_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let this = std::env::current_exe().expect("this program");
    let args = ["--exact", name, "--nocapture"];
    let status = Command::new(this).args(args).env(ALONE, "1").status().expect("it runs");
    assert!(status.success());
    false
}

#[test]
fn clients_that_never_read_hold_no_more_than_there_is_for_them() {
    if !is_alone("limits::clients_that_never_read_hold_no_more_than_there_is_for_them") {
        return;
    }
    let limits = Limits {
        memory_of_all: 128 * MIB,
        stalled: Duration::from_secs(3600),
        ..Limits::default()
    };
    let content = pattern(40 * MIB, 4);
    let served = file(&content, How { limits, ..direct() });
    let before = resident();
    let deaf: Vec<_> = (0..40)
        .map(|_| {
            let mut raw = Raw::greet(from(&served, 1)).expect("a greeting");
            raw.choose();
            for cookie in 0..64 {
                raw.send(&request(cmd::READ, 0, cookie, cookie * 4096, MIB as u32));
            }
            raw
        })
        .collect();
    // All that will be read has been.
    let mut reads = 0;
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let now = served.vbd.stats().read.ended;
        if now > 40 && now == std::mem::replace(&mut reads, now) {
            break;
        }
    }
    let grown = resident() - before;
    // Half of what is there for all, 1 MiB each, and what a connection costs.
    assert!(grown < (64 + 40 * 2 + 32) * MIB, "{} MiB", grown / MIB);
    assert!(grown > 40 * MIB, "{} MiB: they hold nothing", grown / MIB);
    // Others do not notice: not in small requests, nor a client of another host in large ones.
    let mut same = Raw::greet(from(&served, 1)).expect("a greeting");
    same.choose();
    for at in 0..64 {
        assert_eq!(reads_back(&mut same, at * 4096, 4096), content[at as usize * 4096..][..4096]);
    }
    let mut other = Raw::transmit(&served.socket);
    assert!(reads_back(&mut other, 4096, 32 * MIB) == content[4096..][..32 * MIB]);
    assert_eq!(deaf.len(), 40);
}

#[test]
fn who_keeps_memory_that_others_wait_for_is_closed() {
    let limits =
        Limits { memory_of_all: 64 * MIB, stalled: Duration::from_secs(1), ..Limits::default() };
    let served = sparse(64 << 20, How { limits, ..direct() });
    let mut deaf = Raw::transmit(&served.socket);
    deaf.send(&request(cmd::READ, 0, 1, 0, 32 << 20));
    let mut silent = Raw::transmit(&served.socket);
    silent.send(&request(cmd::WRITE, 0, 1, 0, 32 << 20));
    silent.send(&[1; 4096]);
    // Nobody needs it yet.
    std::thread::sleep(Duration::from_secs(3));
    let mut small = Raw::transmit(&served.socket);
    assert_eq!(reads_back(&mut small, 0, MIB), vec![0; MIB]);
    let mut large = Raw::transmit(&served.socket);
    assert_eq!(reads_back(&mut large, 0, 32 * MIB), vec![0; 32 * MIB]);
    // The first that was in the way is gone, and perhaps the second.
    small.send(&request(cmd::FLUSH, 0, 3, 0, 0));
    assert_eq!(small.reply(), Reply::Simple { error: 0, cookie: 3 });
    large.send(&request(cmd::FLUSH, 0, 3, 0, 0));
    assert_eq!(large.reply(), Reply::Simple { error: 0, cookie: 3 });
    drop(silent);
    assert!(deaf.is_closed());
}

/// What they announce and do not send keeps no room from another client of the same user.
#[test]
fn writers_that_stop_halfway_keep_no_room_from_others() {
    let hour = Duration::from_secs(3600);
    let limits = Limits { memory_of_all: 64 * MIB, stalled: hour, ..Limits::default() };
    let served = sparse(64 << 20, How { limits, ..direct() });
    let stalled: Vec<_> = (0..8)
        .map(|_| {
            let mut raw = Raw::transmit(&served.socket);
            raw.send(&request(cmd::WRITE, 0, 1, 0, 32 << 20));
            raw.send(&[1; 64 << 10]);
            raw
        })
        .collect();
    let mut honest = Raw::transmit(&served.socket);
    let content = pattern(24 * MIB, 7);
    honest.send(&request(cmd::WRITE, 0, 2, 0, 24 << 20));
    honest.send(&content);
    assert_eq!(honest.reply(), Reply::Simple { error: 0, cookie: 2 });
    assert!(reads_back(&mut honest, 0, 24 * MIB) == content);
    // Half of a request goes on where it stood.
    let mut last = stalled.into_iter().last().expect("eight");
    last.send(&vec![1; (32 << 20) - (64 << 10)]);
    assert_eq!(last.reply(), Reply::Simple { error: 0, cookie: 1 });
    assert!(reads_back(&mut last, 0, 32 * MIB).iter().all(|byte| *byte == 1));
}

/// What they have sent keeps room, though not for long: a byte now and then does not help.
#[test]
fn writers_that_send_a_byte_now_and_then_are_closed_where_others_wait() {
    let second = Duration::from_secs(1);
    let limits = Limits { memory_of_all: 64 * MIB, stalled: second, ..Limits::default() };
    let served = sparse(64 << 20, How { limits, ..direct() });
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            let mut raw = Raw::transmit(&served.socket);
            let over = &over;
            scope.spawn(move || {
                raw.0.set_write_timeout(Some(second)).expect("a time limit");
                let announced = request(cmd::WRITE, 0, 1, 0, 32 << 20);
                let mut sent = raw.0.write_all(&announced);
                sent = sent.and_then(|()| raw.0.write_all(&vec![1; 6 * MIB + 5]));
                while sent.is_ok() && !over.load(SeqCst) {
                    std::thread::sleep(Duration::from_millis(100));
                    sent = raw.0.write_all(&[1]);
                }
                // It stays connected.
                while !over.load(SeqCst) {
                    std::thread::sleep(Duration::from_millis(100));
                }
            });
        }
        // They have what there is.
        std::thread::sleep(second);
        let mut honest = Raw::transmit(&served.socket);
        honest.send(&request(cmd::WRITE, 0, 2, 0, 16 << 20));
        honest.send(&pattern(16 * MIB, 7));
        let reply = honest.reply();
        over.store(true, SeqCst);
        assert_eq!(reply, Reply::Simple { error: 0, cookie: 2 });
    });
}

#[test]
fn idle_clients_are_closed_where_that_is_wished() {
    let limits = Limits { idle: Some(Duration::from_secs(2)), ..Limits::default() };
    let served = sparse(64 << 20, with(limits));
    let mut busy = Raw::transmit(&served.socket);
    let mut resting = Raw::transmit(&served.socket);
    let mut paying = Raw::transmit(&served.socket);
    paying.send(&request(cmd::WRITE, 0, 1, 0, 4096));
    paying.send(&[7; 100]);
    let mut deaf = Raw::transmit(&served.socket);
    for cookie in 0..20 {
        deaf.send(&request(cmd::READ, 0, cookie, 0, 1 << 20));
    }
    let began = Instant::now();
    resting.0.set_nonblocking(true).expect("a mode");
    let is_closed = |raw: &mut Raw| matches!(std::io::Read::read(&mut raw.0, &mut [0]), Ok(0));
    while !is_closed(&mut resting) {
        assert!(began.elapsed() < Duration::from_secs(60));
        assert_eq!(reads_back(&mut busy, 0, 16), [0; 16]);
    }
    assert!(began.elapsed() > Duration::from_millis(1900));
    for gone in [&mut paying, &mut deaf] {
        gone.0.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        assert!(gone.is_closed());
    }
    // A client may rest as long as it likes where nothing else is said.
    let served = sparse(1 << 20, How::default());
    let mut resting = Raw::transmit(&served.socket);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(reads_back(&mut resting, 0, 16), [0; 16]);
}
