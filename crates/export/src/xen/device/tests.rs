//! A device beside an xenstored in memory, where no domain is.

use std::sync::atomic::{AtomicU32, Ordering::Acquire};

use ringtap_image::{CacheMode, Null};
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::xen::xenstore::fake::Fake;

/// No domain has that number: where these tests run there may be a real 7.
const DOMAIN: u16 = 50000;
const NAME: &str = "xen50000-51712";
const BACK: &str = "backend/vbd/50000/51712";
const FRONT: &str = "/local/domain/50000/device/vbd/51712";

/// An image that opens the `opens_at`th time.
#[derive(Default)]
struct Disk {
    opens_at: u32,
    tried: AtomicU32,
    closed: AtomicU32,
}

impl Disk {
    fn some() -> ringtap_vbd::Disk {
        ringtap_vbd::Disk::from(ringtap_vbd::Vbd::new(
            Box::new(Null::new(1 << 20, false)),
            CacheMode::None,
        ))
    }
}

impl Disks for Disk {
    fn open(&self, wanted: &Wanted<'_>) -> Result<ringtap_vbd::Disk, String> {
        assert_eq!(wanted.name, NAME);
        match self.tried.fetch_add(1, AcqRel) + 1 < self.opens_at {
            true => Err("not now".to_owned()),
            false => Ok(Disk::some()),
        }
    }

    fn close(&self, _: &str) {
        self.closed.fetch_add(1, AcqRel);
    }
}

/// A disk as the toolstack describes it, and a frontend that has made its ring.
fn described(state: u32, frontend: u32) -> Fake {
    let fake = Fake::default();
    for (node, value) in [("frontend", FRONT), ("params", "a disk"), ("mode", "w"), ("online", "1")]
    {
        fake.set(&format!("{BACK}/{node}"), value);
    }
    for (node, value) in [("ring-ref", "8"), ("event-channel", "9")] {
        fake.set(&format!("{FRONT}/{node}"), value);
    }
    fake.set(&format!("{BACK}/state"), &state.to_string());
    fake.set(&format!("{FRONT}/state"), &frontend.to_string());
    fake
}

fn device(fake: &Fake) -> Device {
    let options = Options { queues: 1, persistent: true };
    let device = Device::find(fake.connect(), DOMAIN, 51712, NAME, &options);
    let mut device = device.expect("xenstore").expect("a device");
    (device.vbd, device.opened) = (Some(Disk::some()), Some(("a disk".into(), false)));
    device
}

/// One whose frontend is connected, but for threads.
fn connected(fake: &Fake) -> Device {
    let mut device = device(fake);
    device.connection = Some(device.wanted().expect("a frontend"));
    device
}

fn state(fake: &Fake) -> u32 {
    fake.get(&format!("{BACK}/state")).expect("a state").parse().expect("a number")
}

#[test]
fn a_frontend_has_its_disk_until_it_is_closed() {
    let fake = described(CONNECTED, CLOSING);
    let mut device = connected(&fake);
    // The toolstack wants the disk, and the guest has it mounted.
    fake.set(&format!("{BACK}/online"), "0");
    for _ in 0..2 {
        assert_eq!(device.look(&Disk::default()).expect("a look"), Look::GoOn);
        assert!(device.connection.is_some(), "it is served");
        assert_eq!(state(&fake), CLOSING);
    }
    fake.set(&format!("{FRONT}/state"), &CLOSED.to_string());
    device.look(&Disk::default()).expect("a look");
    assert!(device.connection.is_none() && device.vbd.is_none());
    assert_eq!(state(&fake), CLOSED);
}

#[test]
fn a_disk_that_is_being_taken_away_is_taken_over_while_it_is_used() {
    for (state, frontend, used) in [
        (CONNECTED, CONNECTED, true),
        (CONNECTED, CLOSING, true),
        (CLOSING, CONNECTED, true),
        (CLOSING, CLOSING, true),
        (CLOSING, INITIALISING, false),
        (CLOSING, CLOSED, false),
        (INIT_WAIT, INITIALISED, false),
        (CLOSED, CONNECTED, false),
    ] {
        assert_eq!(is_in_use(Some(state), Some(frontend)), used, "{state} {frontend}");
    }
    assert!(!is_in_use(None, Some(CONNECTED)) && !is_in_use(Some(CONNECTED), None));
}

#[test]
fn a_new_size_takes_nothing_back() {
    for was in [CONNECTED, CLOSING] {
        let fake = described(was, CONNECTED);
        connected(&fake).resize_to_now().expect("xenstore");
        assert_eq!(fake.get(&format!("{BACK}/sectors")).as_deref(), Some("2048"));
        assert_eq!(state(&fake), was);
    }
}

/// Here is no gntdev, or no such domain.
#[test]
fn a_take_over_that_fails_is_tried_again_and_takes_nothing_from_the_guest() {
    for (was, online) in [(CONNECTED, "1"), (CLOSING, "0")] {
        let fake = described(was, CONNECTED);
        fake.set(&format!("{BACK}/online"), online);
        let mut device = device(&fake);
        let pauses = [0, 1, 2].map(|_| {
            device.begin(&Disk::default()).expect("xenstore");
            assert_eq!(device.look(&Disk::default()).expect("a look"), Look::GoOn);
            assert_eq!(state(&fake), was);
            device.retry.as_ref().expect("it is tried again").pause
        });
        assert_eq!(pauses, [FIRST_PAUSE, FIRST_PAUSE * 2, FIRST_PAUSE * 4]);
        fake.set(&format!("{FRONT}/state"), &CLOSED.to_string());
        device.look(&Disk::default()).expect("a look");
        assert!(device.retry.is_none(), "nobody waits for it");
    }
}

#[test]
fn an_image_that_a_guest_waits_for_is_opened_when_that_is_possible() {
    for was in [CONNECTED, CLOSING] {
        let fake = described(was, CONNECTED);
        let mut device = device(&fake);
        (device.vbd, device.opened) = (None, None);
        let disk = Disk { opens_at: 3, ..Disk::default() };
        for status in ["not now", "not now", "ready"] {
            device.begin(&disk).expect("xenstore");
            assert_eq!(fake.get(&format!("{BACK}/{STATUS}")).as_deref(), Some(status));
            assert_eq!(device.look_for_end().expect("a look"), Look::GoOn);
            assert_eq!(state(&fake), was);
            assert!(device.retry.is_some(), "the guest waits");
        }
        assert!(device.opened.is_some());
    }
}

/// The server that the toolstack relied on is gone, and the guest has not come to its disk yet.
#[test]
fn a_guest_that_boots_waits_for_its_image() {
    for was in [INIT_WAIT, CLOSED] {
        let fake = described(was, INITIALISING);
        fake.set(&format!("{BACK}/hotplug-status"), "connected");
        let mut device = device(&fake);
        (device.vbd, device.opened) = (None, None);
        let disk = Disk { opens_at: 3, ..Disk::default() };
        for tried in 1..3 {
            device.begin(&disk).expect("xenstore");
            assert_eq!(device.look_for_end().expect("a look"), Look::GoOn);
            assert!(device.retry.is_some(), "{tried}: the guest waits");
            assert_eq!(state(&fake), was);
        }
        device.begin(&disk).expect("xenstore");
        assert_eq!(device.look(&Disk::default()).expect("a look"), Look::GoOn);
        assert!(device.opened.is_some() && device.retry.is_none());
        assert_eq!(state(&fake), INIT_WAIT, "it is offered");
    }
}

#[test]
fn an_image_that_nobody_will_come_for_is_not_tried_again() {
    let fake = described(INIT_WAIT, INITIALISING);
    fake.set(&format!("{BACK}/hotplug-status"), "connected");
    let mut device = device(&fake);
    (device.vbd, device.opened) = (None, None);
    device.begin(&Disk { opens_at: 3, ..Disk::default() }).expect("xenstore");
    assert!(device.retry.is_some());
    // As `xl block-detach` does.
    fake.set(&format!("{BACK}/online"), "0");
    fake.set(&format!("{BACK}/state"), &CLOSING.to_string());
    device.look_for_end().expect("a look");
    assert!(device.retry.is_none(), "nobody waits for it");
    assert_eq!(state(&fake), CLOSED);
}

/// `xl` has been told and takes away what it has made.
#[test]
fn an_image_that_nobody_waits_for_is_opened_once() {
    let fake = described(INITIALISING, INITIALISING);
    let mut device = device(&fake);
    (device.vbd, device.opened) = (None, None);
    device.begin(&Disk { opens_at: 2, ..Disk::default() }).expect("xenstore");
    assert!(device.retry.is_none() && device.opened.is_none());
    assert_eq!(state(&fake), INIT_WAIT);
    fake.set(&format!("{BACK}/state"), &CLOSING.to_string());
    device.look_for_end().expect("a look");
    assert_eq!(state(&fake), CLOSED);
}

/// The toolstack has given up on an image that came slowly, and attached another.
struct Slow<'a>(&'a Fake);

impl Disks for Slow<'_> {
    fn open(&self, _: &Wanted<'_>) -> Result<ringtap_vbd::Disk, String> {
        self.0.set(&format!("{BACK}/params"), "another disk");
        Ok(Disk::some())
    }

    fn close(&self, _: &str) {}
}

#[test]
fn an_image_that_comes_too_late_is_not_offered_as_the_next() {
    let fake = described(INITIALISING, INITIALISING);
    let mut device = device(&fake);
    (device.vbd, device.opened) = (None, None);
    device.begin(&Slow(&fake)).expect("xenstore");
    assert_eq!((state(&fake), fake.get(&format!("{BACK}/{STATUS}"))), (INITIALISING, None));
    assert_eq!(device.look(&Disk::default()).expect("a look"), Look::Gone);
}

#[test]
fn a_device_that_was_removed_is_not_made_anew() {
    let fake = described(CONNECTED, CONNECTED);
    let mut device = device(&fake);
    (device.vbd, device.opened) = (None, None);
    fake.remove(BACK);
    device.begin(&Disk { opens_at: 2, ..Disk::default() }).expect("xenstore");
    device.write_state(CLOSED).expect("xenstore");
    assert_eq!(fake.get(&format!("{BACK}/{STATUS}")).or(fake.get(&format!("{BACK}/state"))), None);
    assert_eq!(device.look_for_end().expect("a look"), Look::Gone);
}

/// A frontend that has never had its disk is told.
#[test]
fn a_connection_that_cannot_be_made_ends() {
    let fake = described(INIT_WAIT, INITIALISED);
    device(&fake).look(&Disk::default()).expect("a look");
    assert_eq!(state(&fake), CLOSING);
}

#[test]
fn an_error_leaves_nothing_behind() {
    let fake = described(CONNECTED, CONNECTED);
    let mut device = connected(&fake);
    let bell = Arc::new(Bell {
        file: eventfd(0, EventfdFlags::empty()).expect("a bell"),
        resized: false.into(),
        ended: false.into(),
    });
    device.store = Fake::gone();
    let disk = Disk::default();
    device.serve(&disk, &bell, &Stop::new().expect("a stop")).expect_err("no xenstored");
    assert!(device.connection.is_none() && device.vbd.is_none());
    assert_eq!(disk.closed.load(Acquire), 1);
}

#[test]
fn a_disk_that_a_panic_stopped_is_closed_and_not_offered_again() {
    let fake = described(CONNECTED, CONNECTED);
    let mut device = connected(&fake);
    device.end_if_failed().expect("xenstore");
    assert_eq!(state(&fake), CONNECTED);
    let vbd = device.vbd.clone().expect("a disk");
    vbd.health().fail(Panic::of("as the test has it"));
    device.end_if_failed().expect("xenstore");
    // It is not taken from a frontend that has not let go of it.
    assert!(state(&fake) == CLOSING && device.connection.is_some());
    fake.set(&format!("{FRONT}/state"), &CLOSED.to_string());
    device.look(&Disk::default()).expect("a look");
    assert!(state(&fake) == CLOSED && device.connection.is_none() && device.vbd.is_none());
    fake.set(&format!("{FRONT}/state"), &INITIALISING.to_string());
    device.look(&Disk::default()).expect("a look");
    assert_eq!(state(&fake), CLOSED);
}
