//! Headers that somebody means ill with, and headers that lie elsewhere than usual.

use std::time::{Duration, Instant};

use ringtap_io::Tasks;
use ringtap_sim::{Disk, Sim};

use super::{
    CreateOptions, Effort, Error, Hash, HeaderPlace, KeyslotChange, Version, change_keyslots,
    create_header, json, parse, unlock_header,
};
use crate::{Container, Secret, Traits};

const QUICK: Effort = Effort::Exactly { iterations: 1000, memory: 64, cpus: 1 };

fn secret() -> Secret {
    Secret::new(b"hunter2").expect("memory")
}

fn header(version: Version) -> Vec<u8> {
    let options = CreateOptions { version, effort: QUICK, ..CreateOptions::default() };
    create_header(&options, &secret()).expect("a header").0
}

fn refused(bytes: &[u8]) -> String {
    let began = Instant::now();
    let error = unlock_header(bytes, &secret()).err().expect("refused").to_string();
    // Without the limits these would take hours.
    assert!(began.elapsed() < Duration::from_secs(20), "{error}: {:?}", began.elapsed());
    error
}

#[test]
fn a_header_for_elsewhere_opens_again() {
    for version in [Version::Luks1, Version::Luks2] {
        let options = CreateOptions { version, effort: QUICK, ..CreateOptions::default() };
        let (bytes, made) = create_header(&options, &secret()).expect("a header");
        let opened = unlock_header(&bytes, &secret()).expect("opened");
        let mut sectors = vec![7; 2048];
        made.encrypt(1 << 30, &mut sectors);
        assert!(sectors != [7; 2048]);
        opened.decrypt(1 << 30, &mut sectors);
        assert_eq!(sectors, [7; 2048]);
        let other = Secret::new(b"hunter3").expect("memory");
        let error = unlock_header(&bytes, &other).err().expect("refused");
        assert!(matches!(error, Error::WrongSecret { tried: 1, .. }), "{error}");
        unlock_header(&bytes, &other.clone().or(secret())).expect("opened by the second");
        let short = unlock_header(&bytes[..40000], &secret()).err().expect("refused");
        assert!(matches!(short, Error::Short { .. }), "{short}");
    }
}

#[test]
fn luks1_fields_out_of_bounds_are_named() {
    let patch = |at: usize, bytes: &[u8]| {
        let mut header = header(Version::Luks1);
        header[at..at + bytes.len()].copy_from_slice(bytes);
        header
    };
    for (at, bytes, said) in [
        (0, &b"LUXS"[..], "no LUKS header"),
        (6, &[0, 3], "version 3"),
        (8, b"cast5\0", "cast5-xts-plain64"),
        (40, b"ctr-essiv:sha256\0", "aes-ctr-essiv:sha256"),
        (72, b"whirlpool\0", "whirlpool"),
        (72, b"\x1b[2J\0", "\u{fffd}[2J"),
        (104, &[0; 4], "detached"),
        (108, &[0xff; 4], "key size"),
        (164, &[0xff; 4], "digest iterations"),
        (208, &[1, 2, 3, 4], "mark of a keyslot"),
        (208, &[0, 0, 0xde, 0xad], "no keyslot"),
        (212, &[0xff; 4], "PBKDF2 iterations"),
        (248, &[0xff; 4], "key material"),
        (252, &[0xff; 4], "stripes"),
        (252, &[0; 4], "stripes"),
    ] {
        let error = refused(&patch(at, bytes));
        assert!(error.contains(said), "{said}: {error}");
    }
    for len in [0, 5, 6, 7, 8, 591] {
        assert!(parse(&header(Version::Luks1)[..len]).is_err(), "{len}");
    }
}

/// A header with this change to its JSON, and the checksums of both copies right again.
fn with_json(from: &str, to: &str) -> Vec<u8> {
    let mut bytes = header(Version::Luks2);
    let len = super::copies::PLACES[0] as usize;
    for copy in bytes[..2 * len].chunks_exact_mut(len) {
        let text = String::from_utf8_lossy(&copy[super::copies::BINARY_LEN..])
            .trim_end_matches('\0')
            .to_owned();
        assert!(text.contains(from), "{from} is not in {text}");
        let text = text.replacen(from, to, 1);
        copy[super::copies::BINARY_LEN..].fill(0);
        copy[super::copies::BINARY_LEN..][..text.len()].copy_from_slice(text.as_bytes());
        copy[448..512].fill(0);
        let mut digest = [0; 32];
        Hash::Sha256.digest(&[copy], &mut digest);
        copy[448..480].copy_from_slice(&digest);
    }
    bytes
}

#[test]
fn luks2_metadata_out_of_bounds_is_named() {
    for (from, to, said) in [
        (r#""memory":64"#, r#""memory":4194304"#, "Argon2 memory in KiB of 4194304"),
        (r#""time":1000"#, r#""time":4294967295"#, "Argon2 passes"),
        (r#""time":1000"#, r#""time":4294967296"#, "valid"),
        (r#""cpus":1"#, r#""cpus":4294967295"#, "Argon2 lanes"),
        (r#""memory":64"#, r#""memory":0"#, "keyslot 0"),
        (r#""cpus":1"#, r#""cpus":0"#, "keyslot 0"),
        (r#""type":"argon2id""#, r#""type":"scrypt""#, "scrypt"),
        (r#""stripes":4000"#, r#""stripes":4000000000"#, "stripes"),
        (r#""offset":"32768""#, r#""offset":"18446744073709551615""#, "key material"),
        (r#""offset":"32768""#, r#""offset":"0""#, "key material"),
        (r#""offset":"16777216""#, r#""offset":"4096""#, "payload offset"),
        (r#""offset":"16777216""#, r#""offset":"x""#, "digit"),
        (r#""sector_size":512"#, r#""sector_size":0"#, "sector size"),
        (r#""size":"dynamic""#, r#""size":"511""#, "payload size"),
        (r#""type":"crypt""#, r#""type":"linear""#, "linear"),
        (r#""sector_size":512"#, r#""sector_size":512,"integrity":{}"#, "integrity"),
        (r#"xts-plain64","sector"#, r#"xts-essiv","sector"#, "aes-xts-essiv"),
        (r#""keyslots":["0"]"#, r#""keyslots":[]"#, "no keyslot"),
        (r#""type":"luks2""#, r#""type":"reencrypt""#, "no keyslot"),
        (r#""config":{"#, r#""config":{"requirements":{"mandatory":["x9"]},"#, "x9"),
        (r#""segments":{"#, r#""segments":{"9":{"type":"crypt"},"#, "missing field"),
        (r#"{"keyslots""#, r#"[[[[{"keyslots""#, "valid"),
    ] {
        let bytes = with_json(from, to);
        let error = refused(&bytes);
        assert!(error.contains(said), "{to}: {error}");
    }
    let deep = "[".repeat(11_000);
    assert!(json::parse(deep.as_bytes(), 0x4000).is_err());
}

/// What the format leaves to others is passed over: tokens, unknown keyslots, backups of segments.
#[test]
fn what_need_not_be_understood_is_passed_over() {
    for (from, to) in [
        (r#""tokens":{}"#, r#""tokens":{"0":{"type":"systemd-tpm2","keyslots":["1"]}}"#),
        (r#""keyslots":{"#, r#""keyslots":{"5":{"type":"reencrypt","mode":"x"},"#),
        (r#""segments":{"#, r#""segments":{"1":{"type":"linear","flags":["backup-final"]},"#),
        (r#""config":{"#, r#""config":{"flags":["allow-discards"],"#),
    ] {
        let bytes = with_json(from, to);
        assert!(unlock_header(&bytes, &secret()).is_ok(), "{to}");
        assert_eq!(parse(&bytes).expect("a header").allow_discards, to.contains("discards"));
    }
}

#[test]
fn a_slot_to_be_ignored_is_not_tried_and_a_preferred_one_first() {
    let ignored = with_json(r#""key_size":64,"area""#, r#""key_size":64,"priority":0,"area""#);
    assert!(refused(&ignored).contains("no keyslot"));
    let preferred = with_json(r#""key_size":64,"area""#, r#""key_size":64,"priority":2,"area""#);
    assert!(unlock_header(&preferred, &secret()).is_ok());
}

/// Change the keyslots of a header by the first of these secrets, and cut the power at every turn: each time one of them
/// opens what is left.
fn change_under_cuts(
    header: &[u8],
    change: KeyslotChange,
    opens: &[&Secret],
    force: bool,
) -> (Vec<u8>, Result<Vec<u32>, Error>) {
    let disk = Disk::new(512);
    let file = disk.add_file(header.len() as u64, 1);
    disk.poke(file, 0, header);
    let secrets: Vec<Secret> = opens.iter().map(|secret| (*secret).clone()).collect();
    let (len, opener) = (header.len(), secrets[0].clone());
    let mut seed = 0;
    let sim = Sim::new(&disk, 3).at_every_turn(move |cut| {
        for _ in 0..3 {
            seed += 1;
            let mut left = vec![0; len];
            cut.after_power_cut(seed).peek(file, 0, &mut left);
            let open = secrets.iter().any(|secret| unlock_header(&left, secret).is_ok());
            assert!(open, "seed {seed}");
        }
    });
    let container = Container::simulated(file, disk.size(file), Traits::FILE);
    let mut tasks = Tasks::new(Box::new(sim));
    let io = tasks.io().clone();
    let end = tasks.block_on(async move {
        let place = HeaderPlace::default();
        change_keyslots(&io, &container, place, change, Some(&opener), force).await
    });
    let mut bytes = vec![0; len];
    disk.peek(file, 0, &mut bytes);
    (bytes, end.expect("the simulation runs"))
}

#[test]
fn a_power_cut_takes_no_secret_away_but_the_one_that_is_to_go() {
    let other = Secret::new(b"hunter3").expect("memory");
    let opens = |bytes: &[u8]| [&secret(), &other].map(|it| unlock_header(bytes, it).is_ok());
    let fill = |slot| KeyslotChange::Fill { secret: other.clone(), slot, effort: QUICK };
    let first = header(Version::Luks1);
    let (both, filled) = change_under_cuts(&first, fill(None), &[&secret()], false);
    assert_eq!((filled.expect("filled"), opens(&both)), (vec![1], [true, true]));
    let (again, filled) = change_under_cuts(&both, fill(Some(1)), &[&secret()], false);
    assert!(matches!(filled, Err(Error::KeyslotInUse { index: 1 })) && again == both);
    let (again, filled) = change_under_cuts(&both, fill(Some(1)), &[&secret()], true);
    assert_eq!((filled.expect("filled"), opens(&again)), (vec![1], [true, true]));
    let (_, filled) = change_under_cuts(&both, fill(Some(8)), &[&secret()], true);
    assert!(matches!(filled, Err(Error::Field { .. })));

    let erase = KeyslotChange::EraseFor { secret: secret() };
    let (one, erased) = change_under_cuts(&both, erase, &[&other], false);
    assert_eq!((erased.expect("erased"), opens(&one)), (vec![0], [false, true]));
    let material = |bytes: &[u8]| bytes[4096..8192].to_vec();
    assert!(material(&one) != material(&both), "nothing of it is left");
    let (last, erased) =
        change_under_cuts(&one, KeyslotChange::Erase { slot: 1 }, &[&other], false);
    assert!(matches!(erased, Err(Error::LastKeyslot)) && last == one);

    // Over the only one.
    let (only, filled) = change_under_cuts(&first, fill(Some(0)), &[&secret(), &other], true);
    assert_eq!((filled.expect("filled"), opens(&only)), (vec![0], [false, true]));
    assert_eq!(parse(&only).expect("a header").keyslots.len(), 1);
    // Over one of eight: where that is all that the secret opens, there is no way.
    let full = (1..8).fold(first.clone(), |bytes, slot| {
        let (bytes, filled) = change_under_cuts(&bytes, fill(None), &[&secret()], false);
        assert_eq!(filled.expect("filled"), [slot]);
        bytes
    });
    let (after, filled) = change_under_cuts(&full, fill(Some(0)), &[&secret()], true);
    assert!(matches!(filled, Err(Error::NoSpareKeyslot { index: 0 })) && after == full);
    let (after, filled) = change_under_cuts(&full, fill(Some(0)), &[&other], true);
    assert_eq!((filled.expect("filled"), opens(&after)), (vec![0], [false, true]));

    // Places that lie over the payload, or over another keyslot's.
    for sectors in [8u32, 4096] {
        let mut wrong = first.clone();
        wrong[208 + 48 + 40..][..4].copy_from_slice(&sectors.to_be_bytes());
        let (after, filled) = change_under_cuts(&wrong, fill(None), &[&secret()], false);
        assert!(matches!(filled, Err(Error::Field { .. })) && after == wrong, "{sectors}");
    }
    let second = header(Version::Luks2);
    let (_, filled) = change_under_cuts(&second, fill(None), &[&secret()], false);
    assert!(filled.expect_err("LUKS2").to_string().contains("cryptsetup luksAddKey"));
}
