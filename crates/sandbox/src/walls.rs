//! The walls around the calling process, one after the other, and which of them this kernel has not.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use crate::call::{Call, What};
use crate::calls::{self, Wanted};
use crate::client::{self, ask_with};
use crate::files::{self, Files, Held};
use crate::{List, User, notifier, rights};

/// What must be left open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// It works by io_uring.
    pub rings: bool,
    /// It makes connections itself: what it speaks is in a library.
    pub network: bool,
}

/// What is to be around a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Walls {
    /// Which files it opens.
    pub files: Files,
    /// What its broker does for it.
    pub list: List,
    /// What must be left open.
    pub needs: Needs,
    /// Whom it becomes, where root has started it.
    pub user: Option<User>,
}

/// A wall that is not there, or not all of it, and why.
#[derive(Debug)]
pub struct Lacking {
    text: String,
    whole: bool,
}

impl Lacking {
    fn new(what: &str, error: &io::Error) -> Lacking {
        let whole = error.kind() != PARTLY;
        Lacking { text: format!("{what} ({error})"), whole }
    }

    /// Whether there is nothing of it.
    pub fn is_whole(&self) -> bool {
        self.whole
    }
}

impl fmt::Display for Lacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The kind of an error where a part of a wall is there.
const PARTLY: io::ErrorKind = io::ErrorKind::Other;

/// Threads of this name come and go with an opened file, and open nothing; nor do the kernel's, for rings.
const PASSING: [&str; 2] = ["drop cached", "iou-"];

/// What became of it.
#[derive(Debug)]
pub struct Confined {
    /// Whether it is the user that it was to become; it is to serve nobody where it is not.
    pub user: io::Result<()>,
    /// Which walls there are not.
    pub lacking: Vec<Lacking>,
    /// Whether it opens those files alone, as far as this kernel can see to that.
    pub files: bool,
    /// Whether io_uring_setup gives rings of the broker's making from now on.
    pub rings: bool,
}

/// Whether this process has begun to give up what it may.
static UP: AtomicBool = AtomicBool::new(false);

/// Whether a broker may do what this process may not any more.
pub(crate) fn are_up() -> bool {
    UP.load(SeqCst)
}

/// Put the walls up around this thread and all that it starts. Before there is a second one; what cannot be had is told.
pub fn confine(walls: &Walls) -> Confined {
    let mut lacking = vec![];
    // Whether there is anything of it.
    let mut tried = |what: &str, result: io::Result<()>| {
        let Err(error) = result else { return true };
        lacking.push(Lacking::new(what, &error));
        lacking.last().is_some_and(|it| !it.is_whole())
    };
    let Needs { rings, network } = walls.needs;
    let none = || Err(io::Error::new(io::ErrorKind::NotFound, "it could not be started"));
    let owner = walls.user.as_ref().map(User::owner);
    let told = if client::is_there() { client::tell(&walls.list, owner) } else { none() };
    let has_broker = tried("a broker", told);
    UP.store(true, SeqCst);
    tried("no_new_privs", rights::gain_nothing());
    tried("memory that no other process reads", rights::keep_memory_private());
    // From here on nobody mounts anything, or takes it off.
    let files = tried("landlock", held(files::restrict(&walls.files, network)));
    let user = match &walls.user {
        // Nobody else binds its sockets, and removes them.
        Some(_) if !has_broker => Err(io::Error::other("its broker could not be started")),
        Some(user) => rights::become_user(user),
        None => {
            tried("fewer capabilities", rights::give_up());
            Ok(())
        }
    };
    let supervised = rings && has_broker && tried("restricted rings", restrict_rings());
    let wanted = Wanted { rings, sockets: network || !has_broker, modes: !has_broker };
    tried("seccomp", calls::restrict(wanted));
    Confined { user, lacking, files, rings: supervised }
}

/// A second wall, inside the first: of all files of the images' folders only those that are open now, and these. False
/// where another thread lives that would not be behind it.
pub fn narrow(files: &Files) -> Result<bool, Lacking> {
    // One that has just begun bears this process's name.
    let alone = (0..TRIES).any(|_| is_alone() || sleep());
    if !alone {
        return Ok(false);
    }
    held(files::restrict_to_open(files))
        .map(|()| true)
        .map_err(|error| Lacking::new("landlock", &error))
}

/// How often, and how long apart, to look whether threads that pass have their name.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(5);

fn sleep() -> bool {
    std::thread::sleep(PAUSE);
    false
}

fn is_alone() -> bool {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let names = threads.map(|thread| {
        let name = fs::read_to_string(thread.path().join("comm"));
        name.unwrap_or_default().trim().to_owned()
    });
    let passing = |name: &str| PASSING.iter().any(|other| name.starts_with(other));
    names.filter(|name| !passing(name)).count() == 1
}

fn held(outcome: Result<Held, landlock::RulesetError>) -> io::Result<()> {
    match outcome {
        Ok(Held::Whole) => Ok(()),
        Ok(Held::Partly) => Err(io::Error::new(PARTLY, "this kernel has a part of it only")),
        Ok(Held::Not) => {
            let why = "not in this kernel, or not switched on: lsm=landlock";
            Err(io::Error::new(io::ErrorKind::Unsupported, why))
        }
        Err(error) => Err(io::Error::new(io::ErrorKind::Unsupported, error.to_string())),
    }
}

fn restrict_rings() -> io::Result<()> {
    let notifier = notifier::install()?;
    let sent = ask_with(&Call::new(What::Rings), &[notifier.as_fd()]);
    sent.map_or(Ok(()), |answer| answer.map(drop))
}
