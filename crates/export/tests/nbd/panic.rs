//! A panic while requests of a connection are in flight.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use ringtap_export::nbd::wire::{cmd, errno};
use ringtap_image::Null;
use ringtap_vbd::sabotage::Trapped;

use crate::harness::{How, image};
use crate::raw::{Raw, Reply, request};

const TRAP: u64 = 65536;

#[test]
fn a_panic_fails_its_request_and_closes_every_connection_of_the_disk() {
    let trap = |step, offset| assert!(step != "map" || offset != TRAP, "as the test has it");
    let disk = Trapped::boxed(Box::new(Null::new(1 << 20, false)), Arc::new(trap));
    let served = image(disk, How::default());
    let (mut one, mut other) = (Raw::transmit(&served.socket), Raw::transmit(&served.socket));
    other.send(&request(cmd::READ, 0, 1, 0, 512));
    assert_eq!(other.reply(), Reply::Simple { error: 0, cookie: 1 });
    other.take(512);
    one.send(&request(cmd::READ, 0, 2, TRAP, 512));
    assert_eq!(one.reply(), Reply::Simple { error: errno::EIO, cookie: 2 });
    assert!(one.is_closed() && other.is_closed());
    assert!(!Raw::is_welcome(&served.socket), "the export is offered still");
    assert_eq!(
        served.vbd.health().failure().map(|panic| &*panic.message),
        Some("as the test has it")
    );
}

/// Not of a request: the connection's thread itself panics, as it takes the disk for its own.
#[test]
fn a_panic_of_a_connections_own_thread_stops_the_disk_and_closes_every_connection() {
    let armed = Arc::new(AtomicBool::new(false));
    let asked = armed.clone();
    let trap =
        move |step, _| assert!(!(step == "fork" && asked.load(SeqCst)), "as the test has it");
    let disk = Trapped::boxed(Box::new(Null::new(1 << 20, false)), Arc::new(trap));
    let served = image(disk, How::default());
    let mut one = Raw::transmit(&served.socket);
    one.send(&request(cmd::READ, 0, 1, 0, 512));
    assert_eq!(one.reply(), Reply::Simple { error: 0, cookie: 1 });
    one.take(512);
    armed.store(true, SeqCst);
    let mut other = Raw::transmit(&served.socket);
    assert!(other.is_closed() && one.is_closed());
    assert!(!Raw::is_welcome(&served.socket), "the export is offered still");
    assert_eq!(
        served.vbd.health().failure().map(|panic| &*panic.message),
        Some("as the test has it")
    );
}

/// A log that panics when it is told of a request that this disk was not given.
struct Trap;

const TRAPPED: &str = "trapped";

impl io::Write for Trap {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let line = String::from_utf8_lossy(bytes);
        assert!(!(line.contains(TRAPPED) && line.contains("refused")), "as the test has it");
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Nor is it one of a request: the thread panics as it answers one that never comes to the disk.
#[test]
fn a_panic_beside_the_disk_closes_every_connection() {
    tracing_subscriber::fmt().with_ansi(false).with_writer(|| Trap).init();
    let how = How { name: TRAPPED, ..How::default() };
    let served = image(Box::new(Null::new(1 << 20, false)), how);
    let (mut one, mut other) = (Raw::transmit(&served.socket), Raw::transmit(&served.socket));
    other.send(&request(cmd::FLUSH, 0, 1, 0, 0));
    assert_eq!(other.reply(), Reply::Simple { error: 0, cookie: 1 });
    one.send(&request(cmd::READ, 0, 2, 1 << 30, 512));
    assert!(one.is_closed() && other.is_closed());
    assert!(!Raw::is_welcome(&served.socket), "the export is offered still");
    assert_eq!(
        served.vbd.health().failure().map(|panic| &*panic.message),
        Some("as the test has it")
    );
}
