//! The exclusive lock of who writes to an image: taken when it is opened, and kept.
//!
//! Beside it this process notes who it is. A lock whose owner was a process of this host that is gone is broken at once, and
//! its former owner is shut out of the cluster, so that nothing that it had sent comes later; nobody else's is.

use std::fs;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::Name;
use crate::ffi::Image;
use crate::pools::error;

/// The feature.
const EXCLUSIVE_LOCK: u64 = 1 << 2;
/// Under which key it is noted who has the lock.
const NOTE: &str = "ringtap.owner";

/// Who has a lock, as far as that tells whether it still lives.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Owner {
    /// Its address, as the cluster knows it.
    address: String,
    /// This start of the kernel.
    boot: String,
    /// Its namespace of processes.
    space: String,
    process: u32,
    /// When that began, in ticks of the kernel.
    began: u64,
    host: String,
}

impl Owner {
    /// This process.
    fn own(address: String) -> Option<Owner> {
        let process = std::process::id();
        // For people; a service with `ProcSubset=pid` does not see the first.
        let named = ["/proc/sys/kernel/hostname", "/etc/hostname"].map(fs::read_to_string);
        let named = named.into_iter().flatten().next().unwrap_or_default();
        let host = named.split_whitespace().next().unwrap_or("localhost").to_owned();
        if !is_own_proc() {
            return None;
        }
        let (boot, space, began) = (boot()?, space()?, began(process)?);
        Some(Owner { address, boot, space, process, began, host })
    }

    fn parse(text: &str) -> Option<Owner> {
        let mut words = text.split(' ');
        let mut next = || words.next().map(str::to_owned);
        let (address, boot, space) = (next()?, next()?, next()?);
        let boot = digits(&boot);
        let (process, began) = (next()?.parse().ok()?, next()?.parse().ok()?);
        Some(Owner { address, boot, space, process, began, host: next()? })
    }

    fn to_text(&self) -> String {
        let Owner { address, boot, space, process, began, host } = self;
        format!("{address} {boot} {space} {process} {began} {host}")
    }

    /// Whether it is known that it lives no more.
    fn is_gone(&self) -> bool {
        let here =
            boot().as_deref() == Some(&*self.boot) && space().as_deref() == Some(&*self.space);
        if !here || !is_own_proc() {
            return false;
        }
        match state(self.process) {
            Some(State::Dead) => true,
            Some(State::Lives { began }) => began != self.began,
            // It may be hidden from us.
            None => {
                let process = i32::try_from(self.process).ok().and_then(Pid::from_raw);
                process.is_some_and(|process| test_kill_process(process) == Err(Errno::SRCH))
            }
        }
    }
}

/// A service with `ProcSubset=pid` does not see what the kernel says, and is told by who started it.
fn boot() -> Option<String> {
    let kernels = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    let found = kernels.or_else(|| std::env::var("RINGTAP_BOOT_ID").ok());
    Some(digits(&found?)).filter(|digits| !digits.is_empty())
}

/// With hyphens or without, it is the same.
fn digits(text: &str) -> String {
    text.trim().replace('-', "")
}

fn space() -> Option<String> {
    Some(fs::read_link("/proc/self/ns/pid").ok()?.to_str()?.to_owned())
}

/// Whether numbers in /proc are those of this namespace of processes.
fn is_own_proc() -> bool {
    let own = fs::read_link("/proc/self").ok();
    own.is_some_and(|own| own.to_str() == Some(&std::process::id().to_string()))
}

/// What is told of a process.
enum State {
    Lives { began: u64 },
    Dead,
}

/// When a process began that lives.
fn began(process: u32) -> Option<u64> {
    match state(process)? {
        State::Lives { began } => Some(began),
        State::Dead => None,
    }
}

/// What is known of a process; none where it is not told.
fn state(process: u32) -> Option<State> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // A name may have anything in it.
    let mut words = text.get(text.rfind(')')? + 2..)?.split(' ');
    let dead = matches!(words.next()?, "Z" | "X" | "x");
    // Its first thread may have ended before others.
    let alone = || fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count) <= 1;
    if dead && alone() {
        return Some(State::Dead);
    }
    Some(State::Lives { began: words.nth(18)?.parse().ok()? })
}

/// Take the lock; else who has it.
pub(crate) fn take(image: &Image, name: &Name) -> Result<(), String> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |errno: i32| format!("{what}: {}", error(errno))
    };
    let features = image.features().map_err(failed("its features"))?;
    if features & EXCLUSIVE_LOCK == 0 {
        tracing::warn!(
            "{name}: nothing keeps others from writing to it at the same time: rbd feature enable {} exclusive-lock",
            name.spec()
        );
        return Ok(());
    }
    if let Some(address) = image.lock_owner().map_err(failed("its lock"))? {
        take_from(image, name, &address)?;
    }
    image.lock().map_err(|errno| match (errno, image.lock_owner()) {
        (libc::EROFS | libc::EBUSY | libc::EAGAIN, Ok(Some(address))) => {
            has(&address, &noted(image, &address))
        }
        _ => failed("its lock cannot be taken")(errno),
    })?;
    let own = image.lock_owner().ok().flatten().and_then(Owner::own);
    let noted = own.map_or(Err(libc::ENOENT), |own| image.set_note(NOTE, Some(&own.to_text())));
    if let Err(errno) = noted {
        tracing::warn!(
            "{name}: it cannot be noted who has its lock, so that after a kill it is free only after 30 s: {}",
            error(errno)
        );
    }
    Ok(())
}

/// Somebody has the lock: shut that out if it is known to be gone.
fn take_from(image: &Image, name: &Name, address: &str) -> Result<(), String> {
    let watchers = image.watchers().map_err(|errno| format!("its users: {}", error(errno)))?;
    if !watchers.iter().any(|watcher| watcher == address) {
        // The cluster knows that it is gone, and librbd shuts it out.
        return Ok(());
    }
    let owner = noted(image, address);
    let Some(gone) = owner.as_ref().filter(|owner| owner.is_gone()) else {
        return Err(has(address, &owner));
    };
    tracing::warn!(
        "{name}: process {} of this host, which wrote to it, is gone: what it had sent is shut out ({address})",
        gone.process
    );
    image.break_lock(address).map_err(|errno| {
        format!("the lock of {address}, which is gone, cannot be broken: {}", error(errno))
    })
}

/// What is noted of who has that address.
fn noted(image: &Image, address: &str) -> Option<Owner> {
    image.note(NOTE).as_deref().and_then(Owner::parse).filter(|owner| owner.address == address)
}

fn has(address: &str, owner: &Option<Owner>) -> String {
    let who = match owner {
        Some(Owner { host, process, .. }) => {
            format!("ringtap, process {process} of {host} ({address})")
        }
        None => address.to_owned(),
    };
    format!(
        "{who} has its exclusive lock: end that first, or open the image with --read-only; the lock of a host that is gone \
         ends by itself after 30 s"
    )
}

/// The lock is about to be given back.
pub(crate) fn forget(image: &Image) {
    let _ = image.set_note(NOTE, None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_gone_only_where_that_can_be_known() {
        let own = Owner::own("1.2.3.4:0/5".into()).expect("a process");
        assert_eq!(Owner::parse(&own.to_text()), Some(own.clone()));
        assert!(!own.is_gone());
        // Its number is another process's by now.
        assert!(Owner { began: own.began + 1, ..own.clone() }.is_gone());
        let none = Owner { process: i32::MAX as u32, ..own.clone() };
        assert!(none.is_gone());
        assert!(!Owner { boot: "another".into(), ..none.clone() }.is_gone());
        assert!(!Owner { space: "pid:[1]".into(), ..none }.is_gone());
        let hyphens = own.to_text().replace(&own.boot, &format!("{}-", own.boot));
        assert_eq!(Owner::parse(&hyphens), Some(own.clone()), "as one was noted before");
        assert_eq!(Owner::parse("1.2.3.4:0/5 x"), None);
        let mut child = std::process::Command::new("true").spawn().expect("a child");
        let began = (0..500).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            began(child.id()).is_none().then_some(())
        });
        assert!(began.is_some(), "one that was not waited for is gone, too");
        child.wait().expect("its end");
    }
}
