//! An image whose file is another by now: moved to another file system, or copied and the copy put in its place. What a
//! killed server left is of its bytes and not of its inode.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use ringtap_tests::{Server, ok, plain, ringtap};

use crate::{Case, Client, Format, file_system, warnings};

pub(crate) const FORMATS: [Format; 3] = [Format::Overlay, Format::Version2, Format::Vpc];

pub(crate) fn shell(case: &Case, script: &str) {
    ok("sh", "", &["-ec", &format!("cd {}; {script}", plain(case.folder.path()))]);
}

/// What serving it as it is says, which is refused.
pub(crate) fn refused(case: &Case, format: Format) -> String {
    let (image, socket) = (case.image(), format!("unix:{}", plain(&case.socket())));
    let end = case.ringtap(&["serve", plain(&image), "-f", format.name(), "--nbd", &socket]);
    let said = String::from_utf8_lossy(&end.stderr).into_owned();
    assert!(!end.status.success(), "{format:?} is served: {said}");
    said
}

fn converted(case: &Case, image: &Path) -> (Vec<u8>, String) {
    let raw = case.path("raw");
    let _ = fs::remove_file(&raw);
    let below = case.path("below");
    let mut words = vec!["convert", "-f", case.format.name(), "-O", "raw"];
    if case.format == Format::Overlay {
        words.extend(["--allow-backing", plain(&below)]);
    }
    words.extend([plain(image), plain(&raw)]);
    let end = case.ringtap(&words);
    let said = String::from_utf8_lossy(&end.stderr).into_owned();
    assert!(end.status.success(), "{:?}: {said}", case.format);
    (fs::read(&raw).expect("a file"), said)
}

/// Whoever reads the image finds its guest's disk, and so does the next server, though killed as it takes up.
fn taken_up(case: &Case, more: &[&str], context: &str) {
    let (read, said) = converted(case, &case.image());
    assert!(read == case.disk, "{context}: convert: {said}");
    let before = case.path("before");
    let log = fs::File::create(&before).expect("a file");
    for micros in [0, 300, 3000] {
        let mut child = Command::new(ringtap())
            .args(["serve", plain(&case.image()), "-f", case.format.name()])
            .args(["--nbd", &format!("unix:{}", plain(&case.path("other.sock")))])
            .args(more)
            .stdout(Stdio::null())
            .stderr(log.try_clone().expect("a file"))
            .spawn()
            .expect("ringtap");
        std::thread::sleep(std::time::Duration::from_micros(20_000 + micros));
        child.kill().expect("killed");
        child.wait().expect("its end");
    }
    let (found, said) = case.read(case.serve(more));
    let differs = found.iter().zip(&case.disk).position(|(one, other)| one != other);
    let before = fs::read_to_string(before).expect("what those said that were killed");
    assert!(differs.is_none(), "{context}: byte {differs:?}: {before}\n{said}");
    assert!(warnings(&said).is_empty(), "{context}: {before}\n{said}");
    let (found, said) = case.read(case.serve(more));
    assert!(found == case.disk && warnings(&said).is_empty(), "{context}: again: {said}");
}

fn put_over_itself(kind: &str) {
    let set_up = file_system(kind);
    for format in FORMATS {
        for (flush_before, flush_after) in [(true, false), (false, true)] {
            let mut case = Case::new(set_up.folder(), format, "writeback");
            case.killed(flush_before, flush_after, &["cp", "-p"]);
            shell(&case, "cp -a image x && mv x image");
            taken_up(&case, &[], &format!("{kind}, {format:?}, {flush_after}"));
        }
    }
}

#[test]
fn a_copy_that_takes_the_images_place_on_ext4() {
    put_over_itself("ext4");
}

#[test]
fn a_copy_that_takes_the_images_place_on_tmpfs() {
    put_over_itself("tmpfs");
}

#[test]
fn an_image_that_is_moved_to_another_file_system() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for format in FORMATS {
        let mut case = Case::new(from.folder(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let there = to.folder().join(format!("moved-{format:?}"));
        let script = format!("mv image {0} && ln -s {0} image", plain(&there));
        shell(&case, &script);
        // Whoever serves another image there lets the log be.
        let other = Case::new(from.folder(), Format::Overlay, "writeback");
        other.serve(&[]).stop();
        let below = case.path("below");
        let names = ["--backing", plain(&below)];
        let more = if format == Format::Overlay { &names[..] } else { &[] };
        taken_up(&case, more, &format!("ext4 to xfs, {format:?}"));
    }
}

/// The time of the last write is all that tells an older copy from one of the state that was left.
#[test]
fn a_copy_of_which_it_cannot_be_told_is_not_served_unless_somebody_says() {
    let set_up = file_system("ext4");
    for format in FORMATS {
        for choice in ["use", "drop"] {
            let mut case = Case::new(set_up.folder(), format, "writeback");
            case.killed(true, false, &["cp", "-p"]);
            shell(&case, "cp image x && mv x image");
            let before = case.by_qemu(&case.image());
            assert!(before != case.disk);
            for _ in 0..2 {
                let said = refused(&case, format);
                for way in ["--restart-log use", "--restart-log drop"] {
                    assert!(said.contains(way), "{format:?}: {said}");
                }
            }
            let (found, said) = case.read(case.serve(&["--restart-log", choice]));
            let expected = if choice == "use" { &case.disk } else { &before };
            assert!(found == *expected, "{format:?}, {choice}: {said}");
            let (found, said) = case.read(case.serve(&[]));
            assert!(found == *expected, "{format:?}, {choice}, again: {said}");
            assert!(warnings(&said).is_empty(), "{format:?}, {choice}, again: {said}");
        }
    }
}

/// Those that have no place for a stamp in themselves, copied without the note beside them and to another path.
const WITHOUT_STAMP: [Format; 2] = [Format::Version2, Format::Vpc];

#[test]
fn an_image_that_lost_its_note_on_the_way_is_known_by_its_length() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for format in WITHOUT_STAMP {
        let mut case = Case::new(from.folder(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let there = to.folder().join(format!("moved-{format:?}"));
        shell(&case, &format!("cp -p image {0} && rm image && ln -s {0} image", plain(&there)));
        taken_up(&case, &[], &format!("{format:?}"));
        // What it left is nobody else's then: a copy of it as it is now is as good.
        let again = to.folder().join(format!("again-{format:?}"));
        shell(&case, &format!("cp {} {1} && ln -sf {1} image", plain(&there), plain(&again)));
        let (found, said) = case.read(case.serve(&[]));
        assert!(found == case.disk && warnings(&said).is_empty(), "{format:?}, again: {said}");
    }
}

/// Whoever serves a copy of an image that is still there takes nothing from the image, should it be moved later.
#[test]
fn an_image_that_lost_its_note_is_known_after_a_copy_of_it_was_served() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for format in WITHOUT_STAMP {
        let mut case = Case::new(from.folder(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        let [copy, there] =
            ["copy", "moved"].map(|name| to.folder().join(format!("{name}-{format:?}")));
        shell(&case, &format!("cp -p image {}", plain(&copy)));
        let socket = format!("unix:{}", plain(&case.path("other.sock")));
        Server::start([plain(&copy), "-f", format.name(), "--nbd", &socket]).stop();
        shell(&case, &format!("cp -p image {0} && rm image && ln -s {0} image", plain(&there)));
        let (found, said) = case.read(case.serve(&[]));
        assert!(found == case.disk && warnings(&said).is_empty(), "{format:?}: {said}");
    }
}

#[test]
fn one_that_lost_its_note_and_its_time_is_not_served_unless_somebody_says() {
    let (from, to) = (file_system("ext4"), file_system("xfs"));
    for format in WITHOUT_STAMP {
        for choice in ["use", "drop"] {
            let mut case = Case::new(from.folder(), format, "writeback");
            case.killed(true, false, &["cp", "-p"]);
            let there = to.folder().join(format!("{choice}-{format:?}"));
            let script = format!("cp image {0} && rm image && ln -s {0} image", plain(&there));
            shell(&case, &script);
            let before = case.by_qemu(&case.image());
            assert!(before != case.disk);
            let said = refused(&case, format);
            for words in ["--restart-log use", "--restart-log drop", "is as long as"] {
                assert!(said.contains(words), "{format:?}: {said}");
            }
            let (found, said) = case.read(case.serve(&["--restart-log", choice]));
            let expected = if choice == "use" { &case.disk } else { &before };
            assert!(found == *expected, "{format:?}, {choice}: {said}");
            let (found, said) = case.read(case.serve(&[]));
            assert!(found == *expected, "{format:?}, {choice}, again: {said}");
            assert!(warnings(&said).is_empty(), "{format:?}, {choice}, again: {said}");
        }
    }
}

/// A backup of what a killed server left shows it, and leaves it to the image.
#[test]
fn a_copy_beside_its_image_takes_nothing_from_it() {
    let set_up = file_system("ext4");
    for format in FORMATS {
        let mut case = Case::new(set_up.folder(), format, "writeback");
        case.killed(true, false, &["cp", "-p"]);
        shell(&case, "cp -a image copy-a; cp image copy-new");
        let before = case.by_qemu(&case.image());
        let (read, said) = converted(&case, &case.path("copy-a"));
        assert!(read == case.disk, "{format:?}: {said}");
        let (read, said) = converted(&case, &case.path("copy-new"));
        assert!(read == before, "{format:?}: {said}");
        assert_eq!(said.contains("a copy of"), format == Format::Overlay, "{format:?}: {said}");
        let (found, said) = case.read(case.serve(&[]));
        assert!(found == case.disk && warnings(&said).is_empty(), "{format:?}: {said}");
    }
}

/// Of a copy that a server has taken up nobody else's log is.
#[test]
fn a_log_that_a_server_has_is_nobody_elses() {
    let set_up = file_system("ext4");
    for format in FORMATS {
        let mut case = Case::new(set_up.folder(), format, "writeback");
        let server = case.serve(&[]);
        let client = &mut Client::start(&case.socket());
        case.write(client, 0..4, 0xa1, false);
        shell(&case, "cp -a image copy");
        let (copy, expected) = (case.path("copy"), case.by_qemu(&case.path("copy")));
        let (read, said) = converted(&case, &copy);
        assert!(read == expected, "{format:?}: {said}");
        assert!(said.contains("a copy of an image"), "{format:?}: {said}");
        server.stop();
    }
}
