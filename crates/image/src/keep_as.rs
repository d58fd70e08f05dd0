//! What a server keeps before it becomes another user.

use std::io;

use ringtap_sandbox::User;

use crate::user::become_later;
use crate::{record, restart};

/// Keep restart logs and records for that user, in folders that this process makes while it is root: where root's server has
/// `DIR`, its is `DIR-UID`. For the whole process, once, before the first image is opened.
///
/// # Errors
/// Where one cannot be made, or is another's: there is none for the user then.
pub fn keep_as(user: &User) -> io::Result<()> {
    become_later(user);
    let logs = restart::keep_as(user);
    record::keep_as(user).and(logs)
}
