//! The broker: a child of the server, forked before anything was opened, that does what is on the operator's list.
//!
//! It believes nothing that the server says once the list is complete: each message is parsed as if an enemy had
//! written it, each path is followed to where it leads before it is compared. It ends when the server has gone.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags, XattrFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::asker;
use crate::call::{Answer, Call, LONGEST, What, as_path, receive};
use crate::client::{self, dismiss, is_there, pair};
use crate::devices::{DeviceDone, DeviceWish, Devices};
use crate::holder::{self, Holder, Locked};
use crate::list::{List, absolute};
use crate::manager;
use crate::maps;
use crate::next;
use crate::notifier::Notifier;
use crate::sockets::{There, bind_in_place, connect, dial, listen, look, remove, tell_asker};
use crate::user::Owner;

/// What the broker does for whom it does not know: given by who starts it.
#[derive(Clone, Copy)]
pub struct Hooks {
    /// Mount a disk over a file by FUSE, whose descriptor it gives: the file, what is shown as the mount's source, and
    /// whether for reading only.
    pub mount: fn(&Path, &Path, bool) -> io::Result<OwnedFd>,
    /// Take off what is mounted there, also while it is in use.
    pub unmount: fn(&Path, bool) -> io::Result<()>,
    /// A ring that is disabled, and restricted to what servers do; to what those of block devices do where that is so.
    pub ring: fn(bool) -> io::Result<OwnedFd>,
    /// What a server of block devices may have of their driver.
    pub device: fn(&DeviceWish, &Devices) -> io::Result<DeviceDone>,
    /// Let go of a mount in this namespace, if it lies on such a device.
    pub let_go: fn(&Path) -> io::Result<()>,
    /// The variable of the environment by which the next server finds what it is told.
    pub channel: &'static str,
}

/// The most calls that wait for something at a time.
const WAITING: usize = 64;
/// Who waits needs no more.
const STACK: usize = 256 << 10;
/// Make the broker of this process. Before there is a second thread, and before anything secret is in memory.
pub fn start(hooks: Hooks) -> io::Result<()> {
    fork(hooks, false)
}

/// Make another in the place of the broker, which shares the namespace of mounts that this process has now, and that
/// nobody else has. Nothing where there is none. As for [`start`].
pub fn restart(hooks: Hooks) -> io::Result<()> {
    if !is_there() {
        return Ok(());
    }
    dismiss();
    fork(hooks, true)
}

/// Where this program was when the first broker was made.
static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();

fn fork(hooks: Hooks, apart: bool) -> io::Result<()> {
    let (ours, theirs) = pair()?;
    let server = std::process::id();
    // Before another is put in its place, and as it is called in the first namespace of mounts: from another one the kernel
    // says where it is below that one's root, which a chroot is not.
    let program = PROGRAM.get_or_init(|| std::env::current_exe().ok()).clone();
    // SAFETY: this process has one thread, so that the child finds no lock held by another.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(ours);
            let mut broker = Broker::new(server, program, hooks);
            broker.apart = apart;
            let lives = || live(theirs, broker);
            let broke = std::panic::catch_unwind(lives).is_err();
            // SAFETY: it ends the process, and runs nothing of the server's that was to run at its end.
            unsafe { libc::_exit(i32::from(broke)) }
        }
        broker => {
            // For good: whoever asks may be at it.
            let end = Box::leak(Box::new((ours, broker)));
            client::connected(end);
            Ok(())
        }
    }
}

/// What has become of a call.
enum Done {
    Now(Answer),
    /// It takes its time, for which nobody else is to wait.
    Later(Box<dyn FnOnce() -> io::Result<Answer> + Send>),
}

fn later(work: impl FnOnce() -> io::Result<Answer> + Send + 'static) -> io::Result<Done> {
    Ok(Done::Later(Box::new(work)))
}

struct Broker {
    server: u32,
    hooks: Hooks,
    list: List,
    /// What images named before the list was closed: connected to again later, and never bound.
    named: Vec<PathBuf>,
    sealed: bool,
    /// Whether a line of the list that nobody waited for could not be taken.
    misunderstood: bool,
    notifier: Option<Notifier>,
    waiting: Arc<()>,
    /// The server's program, where that was when it was started.
    program: Option<PathBuf>,
    next: Option<Child>,
    devices: Devices,
    /// Whether it has a namespace of mounts with the server alone.
    apart: bool,
    /// Whose the sockets are that it binds, if not this user's.
    owner: Option<Owner>,
}

fn live(socket: OwnedFd, mut broker: Broker) {
    let Ok(socket) = keep_only(socket) else { return };
    let Ok(lives) = server_of(broker.server) else { return };
    let mut bytes = vec![0; LONGEST];
    loop {
        let mut waited = vec![PollFd::new(&socket, PollFlags::IN)];
        waited.extend(lives.as_ref().map(|it| PollFd::new(it, PollFlags::IN)));
        waited.extend(broker.notifier.as_ref().map(|it| PollFd::new(it, PollFlags::IN)));
        match poll(&mut waited, None) {
            Err(Errno::INTR) => continue,
            Err(_) => return,
            Ok(_) => {}
        }
        let is_up = |at: usize| waited.get(at).is_some_and(|it| !it.revents().is_empty());
        let (says, ended) = (is_up(0), lives.is_some() && is_up(1));
        let wants_ring = is_up(1 + usize::from(lives.is_some()));
        drop(waited);
        if ended {
            return;
        }
        if wants_ring {
            let (ring, commands) = (broker.hooks.ring, broker.list.has_devices());
            let make = || beside(move || ring(commands));
            broker.notifier = broker.notifier.take().filter(|it| it.answer(make));
        }
        if says {
            let Ok((len, files)) = receive(&socket, &mut bytes) else { return };
            if len == 0 {
                return;
            }
            let mut files = files.into_iter();
            let Some(answers) = files.next() else {
                broker.take_line(&bytes[..len]);
                continue;
            };
            match broker.carry_out(&bytes[..len], files) {
                Ok(Done::Now(answer)) => answer.give(&answers),
                Ok(Done::Later(work)) => broker.later(work, answers),
                Err(error) => Answer::failed(&error).give(&answers),
            }
        }
    }
}

/// The server's process, whose end is to be seen though others may have its end of the socket: nobody has its rights after it. A
/// signal at its end would not do: the server's walls keep signals in. Nothing on a kernel without such files.
fn server_of(id: u32) -> io::Result<Option<OwnedFd>> {
    let process = i32::try_from(id).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    let found = rustix::process::pidfd_open(process, PidfdFlags::empty()).ok();
    match std::os::unix::process::parent_id() == id {
        true => Ok(found),
        false => Err(Errno::SRCH.into()),
    }
}

/// A ring that a thread makes which ends then. The kernel has who made a ring take part in its end, and holds files that it
/// works on until then: a broker that has something else to do would keep them from whoever comes after the server.
fn beside(ring: impl FnOnce() -> io::Result<OwnedFd> + Send + 'static) -> io::Result<OwnedFd> {
    let made = std::thread::Builder::new().stack_size(STACK).spawn(ring)?.join();
    made.unwrap_or_else(|_| Err(Errno::IO.into()))
}

/// Nothing that the server has, will have or hears of is the broker's.
fn keep_only(socket: OwnedFd) -> io::Result<OwnedFd> {
    next::ignore_signals();
    let _ = rustix::thread::set_name(c"ringtap-broker");
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let kept = rustix::io::fcntl_dupfd_cloexec(&socket, 3)?;
    for usual in 0..3 {
        // SAFETY: this process, which has one thread, writes nothing to what was there.
        unsafe { libc::dup2(null.as_raw_fd(), usual) };
    }
    let number = kept.as_raw_fd();
    // What they name is closed below.
    std::mem::forget((null, socket));
    for (from, to) in [(3, number - 1), (number + 1, i32::MAX)] {
        if from <= to {
            // SAFETY: of what it closes this process uses nothing any more.
            unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
        }
    }
    Ok(kept)
}

impl Broker {
    fn new(server: u32, program: Option<PathBuf>, hooks: Hooks) -> Broker {
        Broker {
            server,
            hooks,
            list: List::default(),
            named: vec![],
            sealed: false,
            misunderstood: false,
            notifier: None,
            waiting: Arc::default(),
            program,
            next: None,
            devices: Devices::new(server),
            apart: false,
            owner: None,
        }
    }

    /// Do it beside all else, and answer then.
    fn later(&self, work: Box<dyn FnOnce() -> io::Result<Answer> + Send>, answers: OwnedFd) {
        if Arc::strong_count(&self.waiting) > WAITING {
            return Answer::failed(&Errno::AGAIN.into()).give(&answers);
        }
        let one = self.waiting.clone();
        let run = move || {
            work().unwrap_or_else(|error| Answer::failed(&error)).give(&answers);
            drop(one);
        };
        // Without a thread the other end is closed, which is an answer, too.
        let _ = std::thread::Builder::new().stack_size(STACK).spawn(run);
    }

    /// What nobody waits for: a line of the list, as long as that is not complete.
    fn take_line(&mut self, bytes: &[u8]) {
        let line = Call::parse(bytes).filter(|call| call.what == What::Allow && !self.sealed);
        self.misunderstood |= !line.is_some_and(|line| self.list.take(&line));
    }

    fn carry_out(
        &mut self,
        bytes: &[u8],
        mut files: impl Iterator<Item = OwnedFd>,
    ) -> io::Result<Done> {
        let call = Call::parse(bytes).ok_or(Errno::INVAL)?;
        let [first, second, ..] = call.numbers;
        let path = as_path(call.first);
        let refused = || Err(io::Error::from(Errno::PERM));
        let done = || Ok(Done::Now(Answer::default()));
        match call.what {
            What::Allow | What::Owner | What::Seal if self.sealed => refused(),
            What::Allow if self.list.take(&call) && !self.misunderstood => done(),
            What::Allow => Err(Errno::INVAL.into()),
            What::Owner => {
                let number = |number| u32::try_from(number).map_err(|_| Errno::INVAL);
                self.owner = Some(Owner { user: number(first)?, group: number(second)? });
                done()
            }
            What::Seal => {
                self.sealed = true;
                done()
            }
            What::Rings if self.notifier.is_none() => {
                self.notifier = files.next().map(Notifier::new);
                done()
            }
            What::Rings => refused(),
            What::Bind => {
                let place = self.place(path, List::has_socket)?;
                let mode = u32::try_from(first).map_err(|_| Errno::INVAL)?;
                let socket = bind_in_place(path, &place, mode, self.owner, || {})?;
                Ok(Done::Now(Answer::of(socket)))
            }
            What::Look => {
                let There { device, inode, is_socket } =
                    look(&self.place(path, List::has_socket)?)?;
                let text = format!("{device} {inode} {is_socket}").into_bytes();
                Ok(Done::Now(Answer { text, ..Answer::default() }))
            }
            What::Remove => {
                let own = || rustix::process::geteuid().as_raw();
                let user = self.owner.map_or_else(own, |owner| owner.user);
                remove(&self.place(path, List::has_socket)?, first, second, user)?;
                done()
            }
            What::Connect => {
                let place = absolute(path)?;
                if !self.named.contains(&place) && !self.list.has_socket(&place) {
                    if self.sealed {
                        return refused();
                    }
                    self.named.push(place.clone());
                }
                later(move || connect(&place, first != 0).map(Answer::of))
            }
            What::Mount => {
                let (place, mount) = (self.place(path, List::has_mount)?, self.hooks.mount);
                let source = as_path(call.second).to_owned();
                later(move || mount(&place, &source, first != 0).map(Answer::of))
            }
            What::Unmount => {
                let (place, unmount) = (self.place(path, List::has_mount)?, self.hooks.unmount);
                later(move || unmount(&place, first != 0).map(|()| Answer::default()))
            }
            What::Listen | What::Dial => {
                let host = std::str::from_utf8(call.first).map_err(|_| Errno::INVAL)?.to_owned();
                let port = u16::try_from(first).map_err(|_| Errno::INVAL)?;
                if call.what == What::Dial && !self.sealed {
                    self.list.dial.push((host.clone(), port));
                }
                match call.what {
                    What::Listen if self.list.may_listen(&host, port) => later(move || {
                        let files = listen(&host, port)?.into_iter().map(OwnedFd::from).collect();
                        Ok(Answer { files, ..Answer::default() })
                    }),
                    What::Dial if self.list.may_dial(&host, port) => later(move || {
                        let limit = Duration::from_millis(second.min(60_000));
                        dial(&host, port, limit).map(|stream| Answer::of(stream.into()))
                    }),
                    _ => refused(),
                }
            }
            What::Attribute | What::SetAttribute => {
                let file = files.next().ok_or(Errno::BADF)?;
                let (name, text) = (call.first.to_vec(), call.second.to_vec());
                // Its file system may not answer.
                match call.what {
                    What::Attribute => later(move || attribute(&file, &name)),
                    _ => later(move || set_attribute(&file, &name, (first != 0).then_some(&text))),
                }
            }
            // As many files are looked at as all processes have open.
            What::Holder => {
                let locked = locked(&call, self.server);
                later(move || Ok(said_of(holder::find(&locked))))
            }
            What::Start => {
                let chosen = (!call.first.is_empty()).then_some((path, first));
                self.start(chosen, files.take(3).collect()).map(Done::Now)
            }
            What::Next => self.look_at_next(first, second).map(Done::Now),
            // Of no library that others have: where those lie is nobody's business.
            What::Private => {
                let file = files.next().ok_or(Errno::BADF)?;
                let process = u32::try_from(first).map_err(|_| Errno::INVAL)?;
                if !maps::is_memory(&file) {
                    return refused();
                }
                later(move || match rustix::fs::fstat(&file)?.st_nlink {
                    0 => {
                        let text = vec![u8::from(maps::is_private(process, &file, second))];
                        Ok(Answer { text, ..Answer::default() })
                    }
                    _ => Err(Errno::PERM.into()),
                })
            }
            What::Device => {
                let (wish, device) =
                    (DeviceWish::of(&call).ok_or(Errno::INVAL)?, self.hooks.device);
                if !self.list.has_devices() {
                    return refused();
                }
                let devices = self.devices.of(self.list.may_show(&wish.image));
                later(move || {
                    let (text, file) = device(&wish, &devices)?;
                    Ok(Answer { text, files: file.into_iter().collect(), ..Answer::default() })
                })
            }
            What::LetGo if self.apart => {
                (self.hooks.let_go)(path).map(|()| Done::Now(Answer::default()))
            }
            What::LetGo => refused(),
            What::Tell => {
                tell_asker(self.server, call.second).map(|()| Done::Now(Answer::default()))
            }
            What::Notify => {
                let (text, server) = (call.second.to_vec(), self.server);
                let next = self.next.as_ref().map(Child::id);
                later(move || manager::tell(&text, server, next).map(|()| Answer::default()))
            }
        }
    }

    /// Start the server's own program as the next one, which confines itself by the words that the operator said, or one that
    /// an operator asks for. One at a time.
    fn start(&mut self, chosen: Option<(&Path, u64)>, usual: Vec<OwnedFd>) -> io::Result<Answer> {
        if let Some((binary, by)) = chosen {
            let by = u32::try_from(by).map_err(|_| Errno::INVAL)?;
            asker::asks_for(by, binary, self.server).map_err(io::Error::other)?;
        }
        if let Some(mut former) = self.next.take() {
            next::end(&mut former);
        }
        let program = chosen.map(|(binary, _)| binary).or(self.program.as_deref());
        let program = program.ok_or(Errno::NOENT)?;
        let (child, channel) = next::spawn(program, self.hooks.channel, usual)?;
        let text = child.id().to_string().into_bytes();
        self.next = Some(child);
        Ok(Answer { text, ..Answer::of(channel.into()) })
    }

    fn look_at_next(&mut self, id: u64, signal: u64) -> io::Result<Answer> {
        let found = self.next.as_mut().filter(|child| u64::from(child.id()) == id);
        let child = found.ok_or(Errno::SRCH)?;
        let lives = child.try_wait()?.is_none();
        match signal as i32 {
            libc::SIGKILL => next::end(child),
            libc::SIGTERM if lives => next::signal(child, Signal::TERM),
            _ => {}
        }
        let status = child.try_wait()?.map(|status| status.into_raw().to_string());
        Ok(Answer { text: status.unwrap_or_default().into_bytes(), ..Answer::default() })
    }

    /// Where a path leads, if that is allowed. The folder's part of it has no links in it.
    fn place(&self, path: &Path, allowed: fn(&List, &Path) -> bool) -> io::Result<PathBuf> {
        let place = absolute(path)?;
        match allowed(&self.list, &place) {
            true => Ok(place),
            false => Err(Errno::PERM.into()),
        }
    }
}

fn locked(call: &Call<'_>, server: u32) -> Locked {
    let [device, inode, byte, but] = call.numbers;
    Locked {
        device: ((device >> 32) as u32, device as u32),
        inode,
        byte: byte as i64,
        but: (server, but as i32),
    }
}

fn said_of(holder: Option<Holder>) -> Answer {
    let text = holder.map(|found| format!("{} {}", found.id, found.name)).unwrap_or_default();
    Answer { text: text.into_bytes(), ..Answer::default() }
}

/// What Ringtap alone writes down, where only root can.
const ROOTS: &[u8] = b"trusted.ringtap.";
/// The same, where whoever may write the file can. Those are set by the broker as well, for the kernel does not ask whether
/// the file is open for writing, nor does landlock: who is confined may set none.
const ANYBODYS: &[u8] = b"user.ringtap.";

fn attribute(file: &OwnedFd, name: &[u8]) -> io::Result<Answer> {
    if !name.starts_with(ROOTS) {
        return Err(Errno::PERM.into());
    }
    let mut text = vec![0; LONGEST - 8];
    let len = rustix::fs::fgetxattr(file, name, &mut text[..])?;
    text.truncate(len);
    Ok(Answer { text, ..Answer::default() })
}

/// Of a file that the server could write to.
fn set_attribute(file: &OwnedFd, name: &[u8], text: Option<&Vec<u8>>) -> io::Result<Answer> {
    // Not that of neither (3), which nobody was asked for.
    let may = rustix::fs::fcntl_getfl(file)? & OFlags::ACCMODE == OFlags::RDWR;
    let ours = [ROOTS, ANYBODYS].iter().any(|it| name.starts_with(it));
    if !ours || !may {
        return Err(Errno::PERM.into());
    }
    match text {
        None => rustix::fs::fremovexattr(file, name)?,
        Some(text) => rustix::fs::fsetxattr(file, name, text, XattrFlags::empty())?,
    }
    Ok(Answer::default())
}

#[doc(hidden)]
#[path = "broker_testing.rs"]
pub mod testing;
#[cfg(test)]
#[path = "broker_tests.rs"]
mod tests;
