//! What the service manager (systemd) is told of a confined server: by its broker, for who has a socket of datagrams could send
//! them, and descriptors, to any such socket of the host.

use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, UCred, sendmsg_addr, socket_with,
};
use rustix::process::Pid;

/// Where the service manager listens, if there is one.
fn place() -> Option<OsString> {
    std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty())
}

/// What a server has to say, line by line. Its process may go over to the next, and to no other: the manager would end that one.
fn may_be_said(text: &[u8], next: Option<u32>) -> bool {
    let is_number = |value: &[u8]| value.iter().all(u8::is_ascii_digit);
    let may = |line: &[u8]| {
        let Some(at) = line.iter().position(|byte| *byte == b'=') else { return false };
        let (name, value) = (&line[..at], &line[at + 1..]);
        match name {
            b"READY" | b"RELOADING" | b"STOPPING" => value == b"1",
            b"STATUS" => true,
            b"MONOTONIC_USEC" => is_number(value),
            b"MAINPID" => next.is_some_and(|next| value == next.to_string().as_bytes()),
            _ => false,
        }
    };
    text.ends_with(b"\n") && text[..text.len() - 1].split(|byte| *byte == b'\n').all(may)
}

/// Tell it, as that server where this process may speak for others. `next`: which process follows it.
pub(crate) fn tell(text: &[u8], server: u32, next: Option<u32>) -> io::Result<()> {
    if !may_be_said(text, next) {
        return Err(Errno::PERM.into());
    }
    let Some(name) = place() else { return Ok(()) };
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        _ => SocketAddrUnix::new(&*name)?,
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    let text = [IoSlice::new(text)];
    let send = |who: Option<UCred>| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        let _fits = who.is_none_or(|who| with.push(SendAncillaryMessage::ScmCredentials(who)));
        sendmsg_addr(&socket, &address, &text, &mut with, SendFlags::NOSIGNAL)
    };
    let server = i32::try_from(server).ok().and_then(Pid::from_raw);
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    match send(server.map(|pid| UCred { pid, uid, gid })) {
        // Only with CAP_SYS_ADMIN. Else the unit takes it from all of its processes.
        Err(Errno::PERM) => send(None)?,
        sent => sent?,
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_but_what_a_server_has_to_say() {
        for text in ["READY=1\nSTATUS=2 disks\n", "RELOADING=1\nMONOTONIC_USEC=7\n", "STOPPING=1\n"]
        {
            assert!(may_be_said(text.as_bytes(), None), "{text}");
        }
        assert!(may_be_said(b"MAINPID=7\n", Some(7)));
        for text in [
            "",
            "\n",
            "READY",
            "READY=1",
            "READY=1\n\n",
            "MAINPID=1\n",
            "MAINPID=77\n",
            "STATUS=\nMAINPID=1\n",
            "FDSTORE=1\n",
            "NOTIFYACCESS=all\n",
            "MONOTONIC_USEC=x\n",
        ] {
            assert!(!may_be_said(text.as_bytes(), Some(7)), "{text}");
        }
        assert!(!may_be_said(b"MAINPID=7\n", None));
    }
}
