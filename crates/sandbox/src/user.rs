//! The user that a server becomes, and for whom its broker makes sockets.

use std::ffi::{CStr, CString};
use std::io;
use std::str::FromStr;

use rustix::process::{DumpableBehavior, dumpable_behavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// A user other than root, and the groups that it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    owner: Owner,
    groups: Vec<u32>,
}

/// Whose a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) user: u32,
    pub(crate) group: u32,
}

/// What the C library takes for "leave it as it is".
const NOBODY_AT_ALL: u32 = u32::MAX;

impl FromStr for User {
    type Err = String;

    /// `NAME|UID[:GROUP|GID]`, as the host knows them. With a group said it is in that one alone.
    fn from_str(text: &str) -> Result<User, String> {
        let (name, group) = match text.split_once(':') {
            Some((name, group)) => (name, Some(group)),
            None => (text, None),
        };
        let failed = |error: io::Error| format!("cannot look up {text}: {error}");
        let number = name.parse::<u32>().ok();
        let entry = entry_of(name, number).map_err(failed)?;
        let user = number.or(entry.as_ref().map(|it| it.owner.user));
        let user = user.ok_or_else(|| format!("this host has no user {name}"))?;
        if user == 0 {
            return Err("root is what a server is without --user: name another".to_owned());
        }
        let (group, groups) = match (group, entry) {
            (Some(group), _) => {
                let group = group_of(group).map_err(failed)?;
                let group = group.ok_or_else(|| format!("this host has no such group: {text}"))?;
                (group, vec![group])
            }
            (None, Some(entry)) => (entry.owner.group, groups_of(&entry).map_err(failed)?),
            (None, None) => {
                return Err(format!(
                    "this host does not know which group user {user} is in: write {user}:GID"
                ));
            }
        };
        match user == NOBODY_AT_ALL || groups.contains(&NOBODY_AT_ALL) {
            true => Err(format!("{NOBODY_AT_ALL} is no user and no group")),
            false => Ok(User { owner: Owner { user, group }, groups }),
        }
    }
}

impl User {
    /// Its number.
    pub fn id(&self) -> u32 {
        self.owner.user
    }

    /// The number of its group.
    pub fn group(&self) -> u32 {
        self.owner.group
    }

    /// Have what root makes on this thread be that user's.
    pub fn makes<T>(&self, make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        made_for(Some(self.owner), make)
    }

    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }
}

/// Be that user and nobody else, for good. All capabilities go with root.
pub(crate) fn become_user(user: &User) -> io::Result<()> {
    let Owner { user: id, group } = user.owner;
    let done = |result: i32| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // Groups first: who is not root any more changes none. These calls are carried out by all threads.
    // SAFETY: the list is as long as is said, and the others are numbers.
    unsafe {
        done(libc::setgroups(user.groups.len(), user.groups.as_ptr()))?;
        done(libc::setresgid(group, group, group))?;
        done(libc::setresuid(id, id, id))?;
    }
    // With root's numbers they have gone, but for some that a parent has meant to pass on. A unit has taken the call away.
    let now = capabilities(None)?;
    if !(now.effective | now.permitted | now.inheritable).is_empty() {
        let none = CapabilitySet::empty();
        let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
        set_capabilities(None, none)?;
    }
    let (mut real, mut effective, mut saved) = (0, 0, 0);
    // SAFETY: three numbers that live here.
    done(unsafe { libc::getresuid(&mut real, &mut effective, &mut saved) })?;
    match [real, effective, saved] == [id; 3] {
        true => Ok(()),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

/// Have the files that `make` makes on this thread belong to somebody, wherever this process may make them.
pub(crate) fn made_for<T>(
    owner: Option<Owner>,
    make: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    let Some(owner) = owner else { return make() };
    let _until_then = Acting::as_owner(owner)?;
    make()
}

/// A thread whose new files are another's.
struct Acting(Option<DumpableBehavior>);

impl Acting {
    fn as_owner(Owner { user, group }: Owner) -> io::Result<Acting> {
        // Else nobody could look any more at which program this process runs, as an upgrade does.
        let acting = Acting(dumpable_behavior().ok());
        // SAFETY: numbers; each gives what there was before, and one that nobody has changes nothing.
        let is = unsafe {
            libc::setfsgid(group);
            libc::setfsuid(user);
            (libc::setfsuid(NOBODY_AT_ALL) as u32, libc::setfsgid(NOBODY_AT_ALL) as u32)
        };
        if is != (user, group) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // With root's number the rights to go anywhere are put aside. Where they cannot be had back the user's own must do.
        let now = capabilities(None)?;
        let _ = set_capabilities(None, CapabilitySets { effective: now.permitted, ..now });
        Ok(acting)
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
        // SAFETY: numbers, which this process has.
        unsafe {
            libc::setfsuid(user.as_raw());
            libc::setfsgid(group.as_raw());
        }
        let _ = self.0.map(set_dumpable_behavior);
    }
}

/// A line of passwd.
struct Entry {
    name: CString,
    owner: Owner,
}

/// The most room that a line of passwd or group gets.
const LONGEST: usize = 1 << 20;

/// Have a function of the C library write there as long as it wants more room: what it gives, by `take`.
fn looked_up<T>(
    mut find: impl FnMut(&mut [libc::c_char]) -> (i32, Option<T>),
) -> io::Result<Option<T>> {
    let mut room = vec![0; 1 << 12];
    loop {
        match find(&mut room) {
            (0, found) => return Ok(found),
            (libc::ERANGE, _) if room.len() < LONGEST => room.resize(room.len() * 4, 0),
            // These say "there is none" as well.
            (libc::ENOENT | libc::ESRCH, _) => return Ok(None),
            (errno, _) => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

fn entry_of(name: &str, number: Option<u32>) -> io::Result<Option<Entry>> {
    let name = CString::new(name)?;
    looked_up(|room| {
        // SAFETY: all zeros is a valid value.
        let mut line: libc::passwd = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        let (at, len) = (room.as_mut_ptr(), room.len());
        // SAFETY: a name that ends, a line, room as long as is said, and a pointer: all live here.
        let end = unsafe {
            match number {
                Some(number) => libc::getpwuid_r(number, &mut line, at, len, &mut found),
                None => libc::getpwnam_r(name.as_ptr(), &mut line, at, len, &mut found),
            }
        };
        let entry = (end == 0 && !found.is_null()).then(|| Entry {
            // SAFETY: the library has written the line, whose name ends and lies in the room.
            name: unsafe { CStr::from_ptr(line.pw_name) }.to_owned(),
            owner: Owner { user: line.pw_uid, group: line.pw_gid },
        });
        (end, entry)
    })
}

fn group_of(name: &str) -> io::Result<Option<u32>> {
    if let Ok(number) = name.parse() {
        return Ok(Some(number));
    }
    let name = CString::new(name)?;
    looked_up(|room| {
        // SAFETY: all zeros is a valid value.
        let mut line: libc::group = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        let (at, len) = (room.as_mut_ptr(), room.len());
        // SAFETY: as for users.
        let end = unsafe { libc::getgrnam_r(name.as_ptr(), &mut line, at, len, &mut found) };
        (end, (end == 0 && !found.is_null()).then_some(line.gr_gid))
    })
}

fn groups_of(entry: &Entry) -> io::Result<Vec<u32>> {
    let mut groups = vec![0; 64];
    loop {
        let mut count = i32::try_from(groups.len()).map_err(io::Error::other)?;
        let at = groups.as_mut_ptr();
        // SAFETY: a name that ends, and a list as long as is said.
        let end =
            unsafe { libc::getgrouplist(entry.name.as_ptr(), entry.owner.group, at, &mut count) };
        let found = usize::try_from(count).map_err(io::Error::other)?;
        if end >= 0 {
            groups.truncate(found);
            return Ok(groups);
        }
        if groups.len() >= LONGEST {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        groups.resize(found.max(groups.len() * 2), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn users_are_found_by_names_and_numbers() {
        let user = |text: &str| text.parse::<User>();
        let nobody = user("nobody").expect("every host has it");
        assert_eq!(user(&nobody.id().to_string()), Ok(nobody.clone()));
        let both = user(&format!("nobody:{}", nobody.group())).expect("a group");
        assert_eq!((both.owner, both.groups), (nobody.owner, vec![nobody.group()]));
        let unknown = user("3999999999:7").expect("numbers need no name");
        assert_eq!((unknown.id(), unknown.groups), (3_999_999_999, vec![7]));
        for (text, said) in [
            ("root", "name another"),
            ("0", "name another"),
            ("0:7", "name another"),
            ("no such user", "has no user"),
            ("", "has no user"),
            ("nobody:no such group", "no such group"),
            ("3999999999", "3999999999:GID"),
            ("4294967295:7", "is no user"),
            ("nobody:4294967295", "is no user"),
            ("a\0b", "cannot look up"),
        ] {
            let why = user(text).expect_err(text);
            assert!(why.contains(said), "{text}: {why}");
        }
    }

    #[test]
    fn what_is_made_for_somebody_is_theirs_wherever_it_is_made() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root makes files for others");
            return;
        }
        let dir = tempfile::tempdir().expect("a folder of root's alone");
        let owner = Owner { user: 65534, group: 65533 };
        let made = |name: &str, owner| {
            let path = dir.path().join(name);
            made_for(owner, || std::fs::write(&path, "")).expect("made");
            let facts = path.metadata().expect("it");
            (facts.uid(), facts.gid())
        };
        assert_eq!(made("theirs", Some(owner)), (65534, 65533));
        assert_eq!(made("ours", None), (0, 0));
        // Who may look at this process is who might before.
        assert_eq!(dumpable_behavior().ok(), Some(DumpableBehavior::Dumpable));
    }
}
