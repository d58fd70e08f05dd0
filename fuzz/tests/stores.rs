//! What a hostile server may say to a client of ours, and names of what it has.

use std::io::{self, Cursor, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use bolero::check;
use ringtap_io::{Io, Op, Tasks, reactor};
use ringtap_stores::nbd::handshake::{ALLOCATION, Agreed, Replies, agree, greet};
use ringtap_stores::nbd::replies::{Reply, Says, parse};
use ringtap_stores::nbd::wire::{
    IHAVEOPT, NBDMAGIC, OPTION_REPLY_MAGIC, can, handshake, info, opt, rep,
};
use ringtap_stores::{Options, Store, Uri};

/// A server whose words are given, and who hears nothing.
struct Deaf<'a>(Cursor<&'a [u8]>);

impl Read for Deaf<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Deaf<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn handshake_of_a_server() {
    check!().for_each(|input: &[u8]| {
        let mut server = Deaf(Cursor::new(input));
        let _ = greet(&mut server);
        // Past the greeting, which few inputs would have.
        let mut server = Deaf(Cursor::new(input));
        if let Ok((agreed, _)) = agree(&mut server, "disk", ALLOCATION) {
            assert!(agreed.block.is_power_of_two() && agreed.most >= agreed.block);
            assert!(agreed.preferred >= agreed.block);
        }
    });
}

#[test]
fn replies_of_a_server() {
    check!().for_each(|input: &[u8]| {
        for replies in [Replies::Simple, Replies::Structured, Replies::Extended] {
            let agreed = facts(replies);
            let mut rest = input;
            while let Ok(Some((reply, taken))) = parse(rest, &agreed) {
                assert!(taken >= 16 && taken <= rest.len());
                if let Reply::Chunk { says: Says::Status(holds), .. } = reply {
                    assert!(holds.len > 0);
                }
                rest = &rest[taken..];
            }
        }
    });
}

fn facts(replies: Replies) -> Agreed {
    let can = can::HAS_FLAGS | can::FLUSH | can::TRIM | can::WRITE_ZEROES;
    let status = (replies != Replies::Simple).then_some(7);
    Agreed { size: 1 << 20, can, block: 1, preferred: 4096, most: 1 << 20, replies, status }
}

/// Agree with a client, hear it, and say what is given.
fn serve(mut client: UnixStream, replies: Replies, words: &[u8]) -> io::Result<()> {
    let mut hello = NBDMAGIC.to_be_bytes().to_vec();
    hello.extend(IHAVEOPT.to_be_bytes());
    hello.extend((handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
    client.write_all(&hello)?;
    client.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        client.read_exact(&mut head)?;
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap_or_default());
        let (option, len) = (word(8), word(12));
        io::copy(&mut (&client).take(len.into()), &mut io::sink())?;
        let answer = |kind: u32, data: &[u8]| {
            let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
            for word in [option, kind, data.len() as u32] {
                bytes.extend(word.to_be_bytes());
            }
            bytes.extend(data);
            (&client).write_all(&bytes)
        };
        let takes = match option {
            opt::EXTENDED_HEADERS => replies == Replies::Extended,
            opt::STRUCTURED_REPLY => replies == Replies::Structured,
            _ => true,
        };
        match option {
            opt::SET_META_CONTEXT => {
                let context = [&7u32.to_be_bytes()[..], b"base:allocation"].concat();
                answer(rep::META_CONTEXT, &context)?;
            }
            opt::GO => {
                let facts = facts(replies);
                let mut export = info::EXPORT.to_be_bytes().to_vec();
                export.extend(facts.size.to_be_bytes());
                export.extend(facts.can.to_be_bytes());
                answer(rep::INFO, &export)?;
            }
            _ => {}
        }
        answer(if takes { rep::ACK } else { rep::ERR_UNSUP }, &[])?;
        if option == opt::GO {
            break;
        }
    }
    client.read_exact(&mut [0; 28])?;
    client.write_all(words)
}

/// Several operations whose replies are what the server makes of them.
async fn ask(io: Io, store: Store) {
    let file = store.file();
    let buffer = io.buffer(8192).expect("memory");
    let ends = [
        io.run(Op::Read { file, offset: 0, mem: buffer.mem() }).await,
        io.run(Op::Status { file, offset: 0, len: 1 << 20 }).await,
        io.run(Op::Sync { file }).await,
        io.run(Op::PunchHole { file, offset: 0, len: 4096 }).await,
    ];
    assert!(ends[0] <= 8192 && ends[2] <= 0 && ends[3] <= 0, "{ends:?}");
}

#[test]
fn a_store_of_a_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).expect("a socket");
    let uri = format!("nbd+unix:///disk?socket={}&reconnect=never", path.display());
    check!().for_each(|input: &[u8]| {
        let Some((first, words)) = input.split_first() else { return };
        let replies =
            [Replies::Simple, Replies::Structured, Replies::Extended][*first as usize % 3];
        thread::scope(|scope| {
            let listener = &listener;
            scope.spawn(move || {
                let client = listener.accept().expect("a client").0;
                let _ = serve(client, replies, words);
            });
            let store = Store::open(&uri, &Options::default()).expect("agreed");
            let mut tasks = Tasks::new(reactor().expect("a reactor"));
            let io = tasks.io().clone();
            tasks.block_on(async move { ask(io, store).await }).expect("turns");
        });
    });
}

/// What an image may name, too.
#[test]
fn a_name_of_an_export() {
    check!().for_each(|input: &[u8]| {
        let _told = ringtap_image::foreign_name(input);
        let Ok(text) = std::str::from_utf8(input) else { return };
        for scheme in ["", "nbd://", "nbd+unix:///", "nbds://h/", "nbds+unix:///e?socket="] {
            let name = format!("{scheme}{text}");
            let Ok(uri) = Uri::parse(&name) else { continue };
            assert!(uri.to_string() == name && uri.export.len() <= name.len());
            assert!((1..=64).contains(&uri.connections));
            assert_eq!(Uri::parse(&uri.to_string()), Ok(uri));
        }
    });
}
