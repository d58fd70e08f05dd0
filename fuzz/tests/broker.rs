//! What a confined server may say to its broker, as its owner would who attacks: nothing is done outside of the list.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use bolero::{TypeGenerator, check};
use ringtap_sandbox::testing::{Desk, Heard, list_of, message, said_again};

#[test]
fn messages_to_the_broker() {
    check!().with_max_len(80 << 10).for_each(|input: &[u8]| {
        if let Some(again) = said_again(input) {
            assert_eq!(again, input, "nothing is left out");
        }
    });
}

#[test]
fn lines_of_the_brokers_list() {
    check!().with_type::<Vec<(u8, u16, Vec<u8>)>>().for_each(|said| {
        let line = |(kind, port, text): &(u8, u16, Vec<u8>)| {
            message(1, [u64::from(*kind % 10), u64::from(*port), 0, 0], text, b"")
        };
        let lines: Vec<Vec<u8>> = said.iter().filter_map(line).collect();
        let (count, same) = list_of(lines.iter().map(Vec::as_slice));
        assert!(count <= lines.len() && same);
    });
}

/// Where a message may lead.
#[derive(Debug, TypeGenerator)]
enum Place {
    Socket,
    Shown,
    Outside(u8),
    Linked(u8),
    Link,
    Image(bool),
    Attribute(bool, u8),
    Folder,
    Words(Vec<u8>),
}

impl Place {
    fn bytes(&self, folder: &Path) -> Vec<u8> {
        let at = |path: &str| folder.join(path).into_os_string().into_encoded_bytes();
        match self {
            Place::Socket => at("served/socket"),
            Place::Shown => at("served/shown"),
            Place::Outside(way) => {
                let ways = ["outside/file", "served/../outside/new", "outside", "served/other"];
                at(ways[usize::from(*way) % ways.len()])
            }
            Place::Linked(way) => {
                let ways = ["served/folder/file", "served/folder/new", "served/folder/../new"];
                at(ways[usize::from(*way) % ways.len()])
            }
            Place::Link => at("served/link"),
            Place::Image(listed) => {
                if *listed {
                    b"null:1M".to_vec()
                } else {
                    b"null:2M".to_vec()
                }
            }
            Place::Attribute(ours, which) => {
                let begin = if *ours { "trusted.ringtap." } else { "trusted.overlay." };
                format!("{begin}{which}").into_bytes()
            }
            Place::Folder => at("served"),
            Place::Words(words) => words.clone(),
        }
    }
}

/// A message: what is asked for, numbers, two texts, and which descriptors come with it.
#[derive(Debug, TypeGenerator)]
struct Say {
    what: u8,
    numbers: [Number; 4],
    first: Place,
    second: Place,
    files: [u8; 2],
}

#[derive(Debug, TypeGenerator)]
enum Number {
    Small(u8),
    Any(u64),
    /// This process, which plays the server and its broker.
    Own,
    /// Of the file that must not be touched: of its device, or its own.
    OfFile(bool),
}

impl Number {
    fn value(&self, outside: &Path) -> u64 {
        use std::os::unix::fs::MetadataExt;
        match self {
            Number::Small(number) => (*number).into(),
            Number::Any(number) => *number,
            Number::Own => std::process::id().into(),
            Number::OfFile(of_device) => {
                let facts = fs::metadata(outside).expect("it is there");
                if *of_device { facts.dev() } else { facts.ino() }
            }
        }
    }
}

/// What is in a folder, and each file's content and attributes.
fn content(folder: &Path) -> BTreeMap<PathBuf, (Vec<u8>, Vec<u8>)> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("one").path());
    let one = |path: PathBuf| {
        let mut names = vec![0; 4096];
        let len = rustix::fs::listxattr(&path, &mut names[..]).unwrap_or(0);
        names.truncate(len);
        let bytes = fs::read(&path).unwrap_or_default();
        (path, (bytes, names))
    };
    entries.map(one).collect()
}

fn descriptors(folder: &Path, which: &[u8; 2]) -> Vec<OwnedFd> {
    let one = |kind: &u8| -> Option<OwnedFd> {
        let file = match kind % 4 {
            0 => return None,
            // As the server has it: for reading alone.
            1 => File::open(folder.join("outside/file")),
            2 => File::options().read(true).write(true).open(folder.join("served/shown")),
            _ => File::open("/dev/null"),
        };
        Some(file.expect("it is there").into())
    };
    which.iter().filter_map(one).collect()
}

/// What is asked for of all processes of the host takes long, and changes nothing.
const HOLDER: u8 = 9;
/// Starts of programs: a descriptor of this process would be the program's.
const START: u8 = 13;

#[test]
fn a_broker_of_messages() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().canonicalize().expect("it");
    for name in ["served", "outside"] {
        fs::create_dir(folder.join(name)).expect("made");
    }
    fs::write(folder.join("served/shown"), "shown").expect("written");
    fs::write(folder.join("outside/file"), "outside").expect("written");
    symlink(folder.join("outside/file"), folder.join("served/link")).expect("a link");
    symlink(folder.join("outside"), folder.join("served/folder")).expect("a link");
    let outside = folder.join("outside");
    let before = content(&outside);
    check!().with_iterations(300).with_type::<Vec<Say>>().for_each(|said| {
        let mut desk = Desk::new(&folder).expect("sockets");
        for Say { what, numbers, first, second, files } in said.iter().take(8) {
            let what = what % 24;
            let numbers = numbers.each_ref().map(|it| it.value(&outside.join("file")));
            let (first, second) = (first.bytes(&folder), second.bytes(&folder));
            let Some(bytes) = message(what, numbers, &first, &second) else { continue };
            if what == HOLDER || what == START {
                continue;
            }
            let files = descriptors(&folder, files);
            if let Heard::Done(text, count) = desk.hear(&bytes, &files) {
                assert!(text.len() + 8 * count < 72 << 10);
            }
            assert!(desk.has_its_list(), "the list is complete");
        }
        drop(desk);
        assert_eq!(content(&outside), before, "nothing outside of the list is touched");
        let served = content(&folder.join("served"));
        let known = ["folder", "link", "shown", "socket"];
        let stray = served.keys().find(|path| !known.iter().any(|name| path.ends_with(name)));
        assert_eq!(stray, None, "nothing else is made");
        assert_eq!(served[&folder.join("served/shown")].0, b"shown");
        let _ = fs::remove_file(folder.join("served/socket"));
    });
}
