//! What the process may do beside opening files: privileges, capabilities, and who may look into it.

use std::io;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

use crate::user::User;

/// What root keeps: images and their folders are anybody's, and landlock says which; records find files by their
/// handles; keys and rings are memory that stays; pipes are as large as they are to be.
const IMAGES: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_RESOURCE);

/// No program that it starts, if it could, has more than itself. The other walls need that.
pub(crate) fn gain_nothing() -> io::Result<()> {
    Ok(set_no_new_privs(true)?)
}

/// Nobody of this user looks into its memory, and there is no dump of it. That is for root's, who has other users' images, and
/// for one that was root's: another user's own programs would no longer see which of that user's servers has an image locked.
/// Whoever has keys has that done where these are (`ringtap_io::Locked`).
pub(crate) fn keep_memory_private() -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Be that user, without any capability and whatever its programs could look at.
pub(crate) fn become_user(user: &User) -> io::Result<()> {
    let now = capabilities(None)?;
    if now.permitted.contains(CapabilitySet::SETPCAP) {
        keep_of_bounds(CapabilitySet::empty());
    }
    crate::user::become_user(user)?;
    // Whoever changes the user is what the host's settings say until then.
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

fn keep_of_bounds(kept: CapabilitySet) {
    for capability in CapabilitySet::all().difference(kept).iter() {
        // One that this kernel has not is not there to be given up.
        let _ = remove_capability_from_bounding_set(capability);
    }
}

/// Give up all capabilities but these, of those that there are.
pub(crate) fn give_up() -> io::Result<()> {
    let kept = IMAGES;
    let now = capabilities(None)?;
    // A unit has taken all others away, and the call that gives up more.
    let (permitted, inheritable) = (now.permitted - kept, now.inheritable);
    if permitted.is_empty() && inheritable.is_empty() {
        return Ok(());
    }
    if now.permitted.contains(CapabilitySet::SETPCAP) {
        keep_of_bounds(kept);
    }
    let sets = CapabilitySets {
        effective: now.effective & kept,
        permitted: now.permitted & kept,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}
