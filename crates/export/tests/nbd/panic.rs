//! A panic while requests of a connection are in flight.

use std::sync::Arc;

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
