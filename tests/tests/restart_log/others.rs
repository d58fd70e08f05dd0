//! What a killed server left for an image that was moved is nobody else's: not a new file's in its place, not an older copy's, not a
//! tenant's who says so, and not one's that comes while a server has it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringtap_tests::{ok, plain};

use crate::moved::{FORMATS, refused, shell};
use crate::{Case, Client, Format, file_system, warnings};

/// The image goes to `to`, and its name is free.
fn move_away(case: &Case, to: &Path) {
    shell(case, &format!("mv image {}", plain(to)));
}

/// The image is found there again, with all that its guest wrote.
fn comes_back(case: &Case, from: &Path, context: &str) {
    shell(case, &format!("rm -f image && ln -s {} image", plain(from)));
    let below = case.path("below");
    let names = ["--backing", plain(&below)];
    let more = if case.format == Format::Overlay { &names[..] } else { &[] };
    let (found, said) = case.read(case.serve(more));
    let differs = found.iter().zip(&case.disk).position(|(one, other)| one != other);
    assert!(differs.is_none(), "{context}: byte {differs:?}: {said}");
    assert!(warnings(&said).is_empty(), "{context}: {said}");
}

/// Those of root, where /run is on tmpfs and elsewhere.
fn logs() -> &'static str {
    const TMPFS: u64 = 0x0102_1994;
    let on_tmpfs = rustix::fs::statfs("/run").is_ok_and(|facts| facts.f_type as u64 == TMPFS);
    if on_tmpfs { "/run/ringtap" } else { "/dev/shm/ringtap-0" }
}

fn log_of(image: &Path) -> PathBuf {
    let facts = fs::metadata(image).expect("the image");
    Path::new(logs()).join(format!("{:x}-{:x}.restart", facts.dev(), facts.ino()))
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).expect("a file").ino()
}

#[test]
fn a_new_image_in_its_place_takes_nothing_from_it() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for format in FORMATS {
        let mut case = Case::new(from.folder(), format, "writeback");
        let there = to.folder().join(format!("image-{format:?}"));
        case.killed(true, false, &["cp", "-p"]);
        move_away(&case, &there);
        let image = case.image();
        ok("qemu-img", "qemu-utils", &["create", "-q", "-f", format.name(), plain(&image), "4M"]);
        let drop = &["--restart-log", "drop"][..];
        // The others have no place to say that they are new: that the copy is one of the moved image cannot be told.
        let none = if format == Format::Overlay { &[][..] } else { drop };
        [none, drop].iter().for_each(|more| _ = case.serve(more).stop());
        comes_back(&case, &there, &format!("{format:?}"));
    }
}

#[test]
fn an_older_copy_takes_nothing_from_it() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for format in FORMATS {
        for name in ["image", "backup"] {
            let mut case = Case::new(from.folder(), format, "writeback");
            let there = to.folder().join(format!("{name}-{format:?}"));
            case.killed(true, false, &["cp", "-a"]);
            move_away(&case, &there);
            shell(&case, &format!("mv copy {name}; test -e image || ln -s {name} image"));
            let expected = case.by_qemu(&case.image());
            let (found, said) = case.read(case.serve(&[]));
            assert!(found == expected, "{format:?}, {name}: {said}");
            comes_back(&case, &there, &format!("{format:?}, {name}"));
        }
    }
}

/// tar keeps whole seconds: whether it took the image before or after its last write cannot be told.
#[test]
fn a_copy_with_a_time_of_whole_seconds_is_asked_about() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for format in FORMATS {
        let mut case = Case::new(from.folder(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let there = to.folder().join(format!("image-{format:?}"));
        let keeps = "touch -d @$(stat -c %Y image)";
        let script =
            format!("cp -a image {0}; {keeps} {0}; rm image; ln -s {0} image", plain(&there));
        shell(&case, &script);
        let said = refused(&case, format);
        assert!(said.contains("--restart-log use"), "{format:?}: {said}");
    }
}

#[test]
fn a_log_that_is_elsewhere_is_missed_by_a_moved_image_too() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    let logs = tempfile::tempdir_in("/dev/shm").expect("a folder");
    for format in FORMATS {
        let mut case = Case::new(from.folder(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let there = to.folder().join(format!("image-{format:?}"));
        move_away(&case, &there);
        shell(&case, &format!("ln -s {} image", plain(&there)));
        let (image, socket) = (case.image(), format!("unix:{}", plain(&case.socket())));
        let words = ["serve", plain(&image), "-f", format.name(), "--nbd", &socket];
        let end = case.ringtap(&[&words[..], &["--state-dir", plain(logs.path())]].concat());
        let said = String::from_utf8_lossy(&end.stderr).into_owned();
        assert!(!end.status.success() && said.contains("--restart-log drop"), "{format:?}: {said}");
        comes_back(&case, &there, &format!("{format:?}"));
    }
}

/// A file gets the inode number of an image that was moved away while some process has its log.
#[test]
fn a_log_that_somebody_has_for_a_moment_makes_way_then() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for format in FORMATS {
        let mut case = Case::new(from.folder(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let there = to.folder().join(format!("image-{format:?}"));
        let (image, before) = (case.image(), inode(&case.image()));
        let (log, device) = (log_of(&image), fs::metadata(&image).expect("it").dev());
        move_away(&case, &there);
        let mut made = 0;
        while made == 0 || inode(&image) != before {
            made += 1;
            assert!(made < 50, "no file gets the inode number");
            // Those before it stay, so that the next gets another.
            shell(&case, &format!("test ! -e image || mv image other-{made}"));
            let words = ["create", "-q", "-f", format.name(), plain(&image), "4M"];
            ok("qemu-img", "qemu-utils", &words);
        }
        let mut holder =
            Command::new("flock").args(["-x", plain(&log), "sleep", "1"]).spawn().expect("flock");
        std::thread::sleep(std::time::Duration::from_millis(200));
        let drop = &["--restart-log", "drop"][..];
        case.serve(if format == Format::Overlay { &[] } else { drop }).stop();
        holder.wait().expect("its end");
        let begin = format!("{device:x}-{before:x}-");
        let aside: Vec<u64> = fs::read_dir(logs())
            .expect("logs")
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&begin))
            .map(|entry| entry.metadata().map_or(0, |facts| facts.blocks() * 512))
            .collect();
        assert!(aside.iter().any(|bytes| (1..65_536).contains(bytes)), "{format:?}: {aside:?}");
        comes_back(&case, &there, &format!("{format:?}"));
    }
}

/// The note beside an image of version 2 is its owner's to write.
#[test]
fn a_tenant_s_note_takes_nothing_from_another_s_image() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for time in ["2001-01-01", "$(stat -c %y image)"] {
        let mut case = Case::new(from.folder(), Format::Version2, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let there = to.folder().join(format!("image-{}", time.len()));
        let (name, mut note) = ("user.ringtap.restart-log", [0; 256]);
        let len = rustix::fs::getxattr(case.image(), name, &mut note).expect("a note");
        shell(&case, "qemu-img create -q -f qcow2 -o compat=0.10 tenant 4M");
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(case.path("tenant"), name, &note[..len], flags).expect("set");
        let move_it = format!("mv image {}; mv tenant image", plain(&there));
        shell(&case, &format!("touch -d \"{time}\" tenant; {move_it}"));
        let said = String::from_utf8_lossy(&case.ringtap(&["info", plain(&case.image())]).stdout)
            .into_owned();
        let (image, socket) = (case.image(), format!("unix:{}", plain(&case.socket())));
        let words = ["serve", plain(&image), "-f", "qcow2", "--nbd", &socket];
        // Taken for its own, or not: that is the tenant's loss.
        let end = Command::new("timeout")
            .args(["-s", "TERM", "3", plain(&ringtap_tests::ringtap())])
            .args(words)
            .output()
            .expect("timeout");
        assert!(!said.is_empty(), "{end:?}");
        comes_back(&case, &there, time);
    }
}

/// A copy of an image that is gone from its file system while its server runs yet.
#[test]
fn a_running_server_s_log_is_not_taken_away() {
    let set_up = file_system("ext4");
    for format in FORMATS {
        // Whoever is asked about waits for the end of a server that may have been killed just now.
        for (gone, seconds) in [("mv image elsewhere", "3"), ("rm image", "8")] {
            let mut case = Case::new(set_up.folder(), format, "writeback");
            let server = case.serve(&[]);
            let client = &mut Client::start(&case.socket());
            case.write(client, 0..4, 0xa1, false);
            let log = log_of(&case.image());
            shell(&case, &format!("cp -a image copy; {gone}; ln -s copy image"));
            let other = format!("unix:{}", plain(&case.path("other.sock")));
            for choice in ["use", "drop"] {
                let image = case.path("copy");
                let served = Command::new("timeout")
                    .args(["-s", "TERM", seconds, plain(&ringtap_tests::ringtap()), "serve"])
                    .args([plain(&image), "-f", format.name(), "--nbd", &other])
                    .args(["--restart-log", choice])
                    .output()
                    .expect("timeout");
                let said = String::from_utf8_lossy(&served.stderr).into_owned();
                assert!(log.exists(), "{format:?}, {gone}, {choice}: {said}");
                // Of one that lies elsewhere a copy is a copy.
                let is_refused = choice == "use" && gone == "rm image";
                assert_eq!(said.contains("still runs"), is_refused, "{format:?}, {gone}: {said}");
            }
            case.kill_it_alone(server);
            if gone.starts_with("mv") {
                shell(&case, "rm image; mv elsewhere image");
                let (found, said) = case.read(case.serve(&[]));
                assert!(found == case.disk, "{format:?}, {gone}: {said}");
                assert!(warnings(&said).is_empty(), "{format:?}, {gone}: {said}");
            }
        }
    }
}

/// An idle image of which all was flushed: nobody knows of its log any more once it is gone, and nothing is lost.
#[test]
fn a_copy_of_an_image_whose_log_went_as_it_was_empty_is_served() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for format in FORMATS {
        let mut case = Case::new(from.folder(), format, "writeback");
        let server = case.serve(&[]);
        case.write(&mut Client::start(&case.socket()), 0..4, 0xa1, true);
        case.kill(server);
        let there = to.folder().join(format!("image-{format:?}"));
        let log = log_of(&case.image());
        move_away(&case, &there);
        // Whoever opens another image there drops it, at times.
        let other = Case::new(from.folder(), Format::Overlay, "writeback");
        other.serve(&[]).stop();
        assert!(!log.exists(), "{format:?}: its log stays");
        shell(&case, &format!("ln -s {} image", plain(&there)));
        let below = case.path("below");
        let names = ["--backing", plain(&below)];
        let more = if format == Format::Overlay { &names[..] } else { &[] };
        let (found, said) = case.read(case.serve(more));
        assert!(found == case.disk, "{format:?}: {said}");
    }
}

/// With all flushed nothing is lost, and nothing is said.
#[test]
fn an_image_of_which_all_was_flushed_is_moved_without_a_word() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for format in FORMATS {
        let mut case = Case::new(from.folder(), format, "writeback");
        let server = case.serve(&[]);
        case.write(&mut Client::start(&case.socket()), 0..4, 0xa1, true);
        case.kill(server);
        let there = to.folder().join(format!("image-{format:?}"));
        move_away(&case, &there);
        comes_back(&case, &there, &format!("{format:?}"));
    }
}
