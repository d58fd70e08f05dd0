use super::*;
use crate::handover::names::{
    CertificatesName, DiskNames, FileName, ImageName, NbdName, SecretName,
};

const STORED: [&[u8]; 15] = [
    include_bytes!("../../../tests/handover/version-1.state"),
    include_bytes!("../../../tests/handover/version-1.connections"),
    include_bytes!("../../../tests/handover/version-2.state"),
    include_bytes!("../../../tests/handover/version-2.connections"),
    include_bytes!("../../../tests/handover/version-3.state"),
    include_bytes!("../../../tests/handover/version-3.connections"),
    include_bytes!("../../../tests/handover/version-4.state"),
    include_bytes!("../../../tests/handover/version-4.connections"),
    include_bytes!("../../../tests/handover/version-5.state"),
    include_bytes!("../../../tests/handover/version-6.state"),
    include_bytes!("../../../tests/handover/version-6.connections"),
    include_bytes!("../../../tests/handover/version-7.state"),
    include_bytes!("../../../tests/handover/version-8.state"),
    include_bytes!("../../../tests/handover/version-8.connections"),
    include_bytes!("../../../tests/handover/version-9.state"),
];

fn state() -> State {
    let described =
        "image = \"/srv/a.qcow2\"\nformat = \"qcow2\"\nvhost-user = [\"unix:/run/a\"]\n";
    State {
        program: "0.1.0".into(),
        disks: vec![
            DiskState {
                described: described.into(),
                file: Some("/etc/ringtap/disks.d/a.toml".into()),
                left_out: None,
                passes: false,
            },
            DiskState {
                described: "image = \"/srv/b\"\n".into(),
                file: None,
                left_out: Some("it is locked".into()),
                passes: false,
            },
        ],
        groups: vec![GroupState {
            described: "[[throttle-group]]\nname = \"g\"\niops = \"100\"\n".into(),
            file: None,
        }],
        listeners: vec![ListenerState {
            asked: "unix:a".into(),
            place: "unix:/run/a".into(),
            socket: 1,
        }],
        mounts: vec![MountState { path: "/srv/a.img".into(), device: 2, made: true }],
        devices: vec![],
        jobs: vec![],
        backups: vec![],
        by_bitmaps: vec![],
        meet_errors: vec![],
        bitmaps: vec![],
        names: Names::default(),
        checkpoints: vec![],
        moments: vec![],
        ended: vec![],
    }
}

fn connections() -> Connections {
    let message = |request, payload: &[u8], files: &[usize]| MessageState {
        request,
        payload: hex::encode(payload),
        files: files.to_vec(),
    };
    Connections {
        began: 12_345,
        vhost_user: vec![FrontEnd {
            place: "/run/a".into(),
            socket: 1,
            requests: Some(2),
            messages: vec![message(3, &[], &[]), message(12, &[0, 1, 0xfe], &[3])],
        }],
        nbd: vec![Client {
            place: "unix:/run/n".into(),
            socket: 4,
            export: "a".into(),
            structured: true,
            extended: false,
            contexts: 1,
            input: hex::encode(b"%`"),
        }],
        modified: vec![("/srv/a.img".into(), 1_700_000_000_000_000_000)],
        control: vec![],
        bitmaps: vec![],
        jobs: vec![],
    }
}

fn with_jobs() -> (State, Connections) {
    let copied = CopyState {
        granularity: 65536,
        from: 1 << 20,
        size: 64 << 20,
        was_ready: false,
        is_pending: false,
        offset: 5 << 20,
        marks: vec![PageState::new(0, &[5, 1 << 63])],
    };
    let mirror = JobState { id: "m".into(), disk: "a".into(), ..JobState::default() };
    let mirror = JobState { copied: Some(copied), completes: true, leaves: true, ..mirror };
    let commit = JobState { id: "c".into(), disk: "b".into(), ..JobState::default() };
    let commit = JobState { paused: Some("no-space".into()), finalized: true, ..commit };
    let state = State { jobs: vec!["m".into(), "c".into()], ..state() };
    (state, Connections { jobs: vec![mirror, commit], ..connections() })
}

fn with_a_backup() -> (State, Connections) {
    let saved = SaveState {
        target: "b".into(),
        granularity: 65536,
        size: 64 << 20,
        zeroed: true,
        some: false,
        limit: Some(1_000_000_000),
        room: None,
        offset: 0,
        shown: None,
        marks: vec![PageState::new(1, &[7])],
        successor: None,
    };
    let saved = Some(saved);
    let backup = JobState { id: "s".into(), disk: "a".into(), saved, ..JobState::default() };
    let (jobs, backups) = (vec!["s".into()], vec!["s".into()]);
    let state = State { jobs, backups, ..state() };
    (state, Connections { jobs: vec![backup], ..connections() })
}

fn with_a_checkpoint() -> State {
    let state = with_a_backup().0;
    State { checkpoints: state.backups.clone(), ..state }
}

fn with_a_moment() -> (State, Connections) {
    let (mut state, mut connections) = with_a_backup();
    state.moments = state.backups.clone();
    for saved in connections.jobs.iter_mut().filter_map(|job| job.saved.as_mut()) {
        let marks = vec![PageState::new(0, &[3])];
        let (bitmap, granularity, recording) = ("part".into(), 65536, false);
        saved.shown = Some(vec![MarksState { bitmap, granularity, recording, marks }]);
        (saved.zeroed, saved.room) = (false, Some(10 << 30));
    }
    (state, connections)
}

fn with_ended_jobs() -> State {
    let well = EndedState {
        id: "w".into(),
        kind: "backup".into(),
        error: None,
        offset: 64 << 20,
        total: 64 << 20,
        speed: 1 << 20,
        pends: true,
        pause: 5_000_000,
    };
    let (id, kind, error) = ("f".into(), "create".into(), Some("no space".into()));
    let failed = EndedState { id, kind, error, total: 512, ..EndedState::default() };
    State { ended: vec![well, failed], ..state() }
}

fn with_a_bitmap() -> (State, Connections) {
    let (mut state, mut connections) = with_a_backup();
    state.by_bitmaps = state.backups.clone();
    for saved in connections.jobs.iter_mut().filter_map(|job| job.saved.as_mut()) {
        (saved.zeroed, saved.some) = (false, true);
        saved.successor = Some(MarksState {
            bitmap: "daily".into(),
            granularity: 4096,
            recording: true,
            marks: vec![PageState::new(2, &[9, 0, 1 << 62])],
        });
    }
    (state, connections)
}

fn with_names() -> State {
    let secrets = vec![SecretName { id: "s".into(), source: "file:/etc/key".into() }];
    let files = vec![FileName {
        name: "f".into(),
        path: "/srv/a.img".into(),
        driver: "file".into(),
        read_only: false,
        cache: Some("writeback".into()),
        keeps_space: true,
        implicit: true,
    }];
    let images = vec![ImageName {
        name: "old".into(),
        path: "/srv/base.qcow2".into(),
        format: "qcow2".into(),
        size: 64 << 20,
        in_file: Some("f".into()),
    }];
    let (disk, in_file) = ("a".into(), Some("f".into()));
    let disks = vec![DiskNames { disk, in_file, by_image: true, ..DiskNames::default() }];
    let names = Names { secrets, files, images, disks, ..Names::default() };
    State { names, ..state() }
}

fn with_certificates() -> State {
    let certificates = |id: &str, server: bool| CertificatesName {
        id: id.into(),
        folder: "/etc/pki".into(),
        server,
        verify_peer: true,
    };
    let (address, shown) = ("unix:/run/n".into(), Some(certificates("former", true)));
    let nbd = NbdName { address, certificates: shown, most: Some(7), is_used: true };
    let mut state = with_names();
    state.names.certificates = vec![certificates("s", true), certificates("c", false)];
    state.names.nbd = Some(nbd);
    let (disk, upon) = ("b".into(), Some("a".into()));
    let lies = DiskNames { disk, upon, layers: Some(1), alone: true, ..DiskNames::default() };
    state.names.disks.push(lies);
    state.bitmaps = vec!["a".into()];
    state.meet_errors = vec!["c".into()];
    state
}

fn with_temporary_bitmaps() -> Connections {
    let marks = MarksState {
        bitmap: "t".into(),
        granularity: 65536,
        recording: false,
        marks: vec![PageState::new(1, &[3])],
    };
    let bitmaps = vec![BitmapState { disk: "a".into(), number: 1, marks }];
    Connections { bitmaps, ..with_a_bitmap().1 }
}

#[test]
fn what_was_stored_is_read_for_ever() {
    if let Some(folder) = std::env::var_os("RINGTAP_TEST_STATE") {
        let folder = PathBuf::from(folder);
        let write = |name: &str, text: Result<Vec<u8>, String>| {
            std::fs::write(folder.join(name), text.expect("it is written")).expect("a file");
        };
        write("version-1.state", encode(&state()));
        write("version-1.connections", encode(&connections()));
        write("version-2.state", encode(&with_jobs().0));
        write("version-2.connections", encode(&with_jobs().1));
        write("version-3.state", encode(&with_a_backup().0));
        write("version-3.connections", encode(&with_a_backup().1));
        write("version-4.state", encode(&with_a_bitmap().0));
        write("version-4.connections", encode(&with_a_bitmap().1));
        write("version-5.state", encode(&with_names()));
        write("version-6.state", encode(&with_certificates()));
        write("version-6.connections", encode(&with_temporary_bitmaps()));
        write("version-7.state", encode(&with_a_checkpoint()));
        write("version-8.state", encode(&with_a_moment().0));
        write("version-8.connections", encode(&with_a_moment().1));
        write("version-9.state", encode(&with_ended_jobs()));
        return;
    }
    assert_eq!(decode(STORED[0]), Ok(state()));
    assert_eq!(decode(STORED[1]), Ok(connections()));
    // What a program cannot go without that knows of no jobs is of a version that it does not read.
    let (state, connections) = (decode::<State>(STORED[2]), decode::<Connections>(STORED[3]));
    assert_eq!((state, connections), (Ok(with_jobs().0), Ok(with_jobs().1)));
    assert!(STORED[..2].iter().all(|stored| stored.starts_with(b"ringtap-handover 1 ")));
    assert!(STORED[2..4].iter().all(|stored| stored.starts_with(b"ringtap-handover 2 ")));
    assert!(STORED[4..6].iter().all(|stored| stored.starts_with(b"ringtap-handover 3 ")));
    assert!(STORED[6..8].iter().all(|stored| stored.starts_with(b"ringtap-handover 4 ")));
    let (state, connections) = (decode::<State>(STORED[4]), decode::<Connections>(STORED[5]));
    assert_eq!((state, connections), (Ok(with_a_backup().0), Ok(with_a_backup().1)));
    let (state, connections) = (decode::<State>(STORED[6]), decode::<Connections>(STORED[7]));
    assert_eq!((state, connections), (Ok(with_a_bitmap().0), Ok(with_a_bitmap().1)));
    assert!(STORED[8].starts_with(b"ringtap-handover 5 "));
    assert_eq!(decode(STORED[8]), Ok(with_names()));
    assert!(STORED[9].starts_with(b"ringtap-handover 6 "));
    assert_eq!(decode(STORED[9]), Ok(with_certificates()));
    assert!(STORED[10].starts_with(b"ringtap-handover 6 "));
    assert_eq!(decode(STORED[10]), Ok(with_temporary_bitmaps()));
    assert!(STORED[11].starts_with(b"ringtap-handover 7 "));
    assert_eq!(decode(STORED[11]), Ok(with_a_checkpoint()));
    assert!(STORED[12..14].iter().all(|stored| stored.starts_with(b"ringtap-handover 8 ")));
    let (state, connections) = (decode::<State>(STORED[12]), decode::<Connections>(STORED[13]));
    assert_eq!((state, connections), (Ok(with_a_moment().0), Ok(with_a_moment().1)));
    assert!(STORED[14].starts_with(b"ringtap-handover 9 "));
    assert_eq!(decode(STORED[14]), Ok(with_ended_jobs()));
    // Each of these is reason enough that a program refuses that does not know it.
    let (bitmaps, meet_errors) = (vec!["a".into()], vec!["c".into()]);
    let with = [State { bitmaps, ..with_jobs().0 }, State { meet_errors, ..with_jobs().0 }];
    assert_eq!(with.map(|state| state.version()), [WITH_CERTIFICATES; 2]);
    let page = PageState::new(3, &[5, 1 << 63]);
    assert_eq!(page.words(), Some((3, vec![5, 1 << 63])));
    assert_eq!(PageState { bits: "zz".into(), ..page }.words(), None);
    let (state, connections) = (self::state(), self::connections());
    // What has come since.
    let devices = vec![DeviceState { disk: "a".into(), number: 7 }];
    let newer = State { devices, ..state };
    // Programs that read the first version alone do not know of devices.
    assert_eq!(newer.version(), WITH_JOBS);
    assert_eq!(encode(&newer).and_then(|text| decode(&text)), Ok(newer));
    let newer = Connections { control: vec![5, 6], ..self::connections() };
    assert_eq!(encode(&newer).and_then(|text| decode(&text)), Ok(newer));
    assert_eq!(hex::decode(&connections.vhost_user[0].messages[1].payload), Ok(vec![0, 1, 0xfe]));
}

#[test]
fn what_an_older_program_does_not_read_is_named_with_what_to_do() {
    let why = |version: u32, reads: &str| {
        format!("its state is of version {version}, and this program reads {reads}")
    };
    // As programs have said it that read one version, and several.
    let said = with_ended_jobs().what_to_do(&why(9, "1 to 8")).expect("it is known");
    assert!(said.contains("jobs that have ended (w, f): dismiss them (job-dismiss)"), "{said}");
    let said = with_a_bitmap().0.what_to_do(&why(4, "1")).expect("it is known");
    assert!(said.contains("by a bitmap (s)") && said.contains("jobs at work (s)"), "{said}");
    let said = with_a_bitmap().0.what_to_do(&why(4, "1 to 3")).expect("it is known");
    assert!(said.contains("by a bitmap (s)") && !said.contains("jobs at work"), "{said}");
    assert!(with_certificates().what_to_do(&why(6, "1 to 5")).expect("it").contains("run time"));
    assert_eq!(with_ended_jobs().what_to_do(&why(8, "1 to 7")), None);
    assert_eq!(with_ended_jobs().what_to_do("the image is locked"), None);
    // All there is in a state of another version than the first is told of.
    let devices = vec![DeviceState { disk: "a".into(), number: 7 }];
    let shown = State { devices, ..state() };
    for state in [with_jobs().0, with_names(), with_a_checkpoint(), with_a_moment().0, shown] {
        let said = state.what_to_do(&why(state.version(), "1"));
        assert!(state.version() > PLAIN && said.is_some_and(|said| said.contains(": ")));
    }
}

#[test]
fn another_version_and_what_is_damaged_is_refused() {
    let good = encode(&state()).expect("it is written");
    let text = String::from_utf8(good.clone()).expect("text");
    let newer = text.replacen(" 1 ", " 999 ", 1);
    let why = decode::<State>(newer.as_bytes()).expect_err("newer");
    assert!(why.contains("version 999"), "{why}");
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        assert!(decode::<State>(&bad).is_err(), "byte {at}");
        assert!(decode::<State>(&good[..at]).is_err(), "cut at {at}");
    }
}
