//! A broker that hears bytes, without a server: nothing is started, and what its hooks are told is checked.

use std::fs::File;

use super::*;
use crate::call::{FILES, send};

/// The broker of a server that has `socket`, `shown` and the image `null:1M` on its list.
pub struct Desk {
    broker: Broker,
    ends: (OwnedFd, OwnedFd),
}

/// What came of a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// It is none.
    Nonsense,
    /// It was refused, or failed, with that error of the kernel; -1 where it has none.
    Refused(i32),
    /// It was done: the answer's text, and how many descriptors come with it.
    Done(Vec<u8>, usize),
}

/// The most descriptors that come with a message, but for the first, by which it is answered.
pub const MOST_FILES: usize = FILES - 1;

/// Whether a path is that of the file that may be mounted over.
fn is_listed(path: &Path) -> io::Result<()> {
    let listed = path.ends_with("served/shown");
    assert!(listed, "{} is not on the list", path.display());
    Ok(())
}

fn mount(path: &Path, _: &Path, _: bool) -> io::Result<OwnedFd> {
    is_listed(path)?;
    Ok(File::open(path)?.into())
}

fn unmount(path: &Path, _: bool) -> io::Result<()> {
    is_listed(path)
}

fn device(wish: &DeviceWish, devices: &Devices) -> io::Result<DeviceDone> {
    assert_eq!(devices.may_show, wish.image == Path::new("null:1M"));
    devices.must_have(wish.id).map(|()| (wish.data.clone(), None))
}

fn never(_: &Path) -> io::Result<()> {
    panic!("it has no namespace of mounts with the server alone")
}

impl Desk {
    /// The list is complete. `folder`: `served` there is the only place with something on it.
    ///
    /// # Errors
    /// Where there are no sockets to be had.
    pub fn new(folder: &Path) -> io::Result<Desk> {
        let ring = |_: bool| Err(io::Error::from(Errno::NOSYS));
        let hooks = Hooks { mount, unmount, ring, device, let_go: never, channel: "NONE" };
        let mut broker = Broker::new(std::process::id(), None, hooks);
        let at = |name: &str| folder.join("served").join(name);
        broker.list = List {
            sockets: vec![at("socket")],
            mounts: vec![at("shown")],
            devices: vec!["null:1M".into()],
            ..List::default()
        };
        broker.sealed = true;
        Ok(Desk { broker, ends: pair()? })
    }

    /// A message as it comes, with descriptors.
    pub fn hear(&mut self, bytes: &[u8], files: &[OwnedFd]) -> Heard {
        let (ours, theirs) = &self.ends;
        let with: Vec<_> = files.iter().take(MOST_FILES).map(AsFd::as_fd).collect();
        if bytes.is_empty() || send(ours, bytes, &with).is_err() {
            return Heard::Nonsense;
        }
        let mut whole = vec![0; LONGEST];
        let (len, files) = receive(theirs, &mut whole).expect("it was sent");
        self.broker.take_line(&whole[..len]);
        let is_call = Call::parse(&whole[..len]).is_some();
        let done = self.broker.carry_out(&whole[..len], files.into_iter());
        let done = done.and_then(|done| match done {
            Done::Now(answer) => Ok(answer),
            Done::Later(work) => work(),
        });
        match done {
            Err(error) if is_call => Heard::Refused(error.raw_os_error().unwrap_or(-1)),
            Err(_) => Heard::Nonsense,
            Ok(answer) => {
                assert!(is_call && answer.errno == 0 && answer.files.len() <= FILES);
                // It fits into a message.
                answer.give(ours);
                let answer = Answer::receive(theirs).expect("it was given");
                Heard::Done(answer.text, answer.files.len())
            }
        }
    }

    /// Whether nothing has come onto the list.
    pub fn has_its_list(&self) -> bool {
        let List { sockets, folders, listen, dial, any_tcp, mounts, devices, any_device } =
            &self.broker.list;
        let none = folders.len() + listen.len() + dial.len() == 0 && !any_tcp && !any_device;
        let named = self.broker.named.is_empty() && self.broker.owner.is_none();
        none && named && [sockets.len(), mounts.len(), devices.len()] == [1; 3]
    }
}

/// A list as lines make it that anybody says, before it is complete: how many places are on it, and whether it says the same
/// again.
pub fn list_of<'a>(lines: impl Iterator<Item = &'a [u8]>) -> (usize, bool) {
    let mut list = List::default();
    for line in lines {
        let call = Call::parse(line).filter(|call| call.what == What::Allow);
        let _taken = call.is_some_and(|call| list.take(&call));
    }
    let mut again = List::default();
    let said = list.lines(|call| match again.take(&call) {
        true => Ok(()),
        false => Err(Errno::INVAL.into()),
    });
    let List { sockets, folders, listen, dial, mounts, devices, .. } = &list;
    let paths = sockets.len() + folders.len() + mounts.len() + devices.len();
    (paths + listen.len() + dial.len(), said.is_ok() && again == list)
}

/// A message of these parts, if it is not too long; of the number `what`, whatever that is.
pub fn message(what: u8, numbers: [u64; 4], first: &[u8], second: &[u8]) -> Option<Vec<u8>> {
    let call = Call { what: What::Allow, numbers, first, second };
    let mut bytes = call.bytes()?;
    bytes[0] = what;
    Some(bytes)
}

/// The message that bytes are, as it would be said again; none where they are none.
pub fn said_again(bytes: &[u8]) -> Option<Vec<u8>> {
    let call = Call::parse(bytes)?;
    let _wish = DeviceWish::of(&call);
    call.bytes()
}
