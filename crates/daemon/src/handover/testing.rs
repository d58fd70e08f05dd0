//! What is made of what another server passes, without a server.

use std::io::Write;
use std::os::unix::net::UnixStream;

use ringtap_image::{CacheMode, Null};
use ringtap_vbd::{Backup, Disk, Unfinished, Vbd};

use super::channel::Channel;
use super::state::{Connections, CopyState, SaveState, State, decode, encode, headed};

/// The body of a state as it is passed, with a first line that is right.
pub fn passed(version: u32, body: &[u8]) -> Vec<u8> {
    headed(version, body)
}

/// A state as it would be passed on.
///
/// # Errors
/// Where it cannot be read.
pub fn state_again(bytes: &[u8]) -> Result<Vec<u8>, String> {
    encode(&decode::<State>(bytes)?)
}

/// Connections as they would be passed on.
///
/// # Errors
/// Where they cannot be read.
pub fn connections_again(bytes: &[u8]) -> Result<Vec<u8>, String> {
    encode(&decode::<Connections>(bytes)?)
}

/// The same once each job has gone on, by what it has left, on a disk of so many bytes and a target as large.
///
/// # Errors
/// Where they cannot be read, or what a job has left makes no sense.
pub fn jobs_go_on(bytes: &[u8], size: u64) -> Result<Vec<u8>, String> {
    let disk = || -> Disk { Vbd::new(Box::new(Null::new(size, false)), CacheMode::None).into() };
    let mut all: Connections = decode(bytes)?;
    for job in &mut all.jobs {
        let wrong = || format!("what is left of the job {} cannot be read", job.id);
        if let Some(copied) = &mut job.copied {
            let left = copied.left().ok_or_else(wrong)?;
            *copied = CopyState::of(Unfinished::of(&disk(), &left).left());
        }
        if let Some(saved) = &mut job.saved {
            let left = saved.left().ok_or_else(wrong)?;
            let moment = Backup::new(disk(), disk()).go_on(&left);
            let left = moment.map_err(|error| error.to_string())?.left();
            *saved = SaveState::of(std::mem::take(&mut saved.target), left);
        }
    }
    encode(&all)
}

/// The texts of the messages that bytes are, of which no descriptors come, and why there are no more.
///
/// # Errors
/// Where there can be no channel.
pub fn hear(bytes: &[u8]) -> std::io::Result<(Vec<String>, Option<String>)> {
    let (ours, mut theirs) = UnixStream::pair()?;
    theirs.set_nonblocking(true)?;
    theirs.write_all(bytes)?;
    drop(theirs);
    let (channel, mut texts) = (Channel(ours), vec![]);
    loop {
        match channel.receive(None) {
            Ok(Some(message)) => texts.push(message.text),
            Ok(None) => return Ok((texts, None)),
            Err(error) => return Ok((texts, Some(error.to_string()))),
        }
    }
}
