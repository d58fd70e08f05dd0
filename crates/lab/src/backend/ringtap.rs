//! Ringtap, as `ringtap serve`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};

use super::loopdev::LoopDevice;
use super::{Access, Backend, Context, Image, Mount, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::{Error, Result};
use crate::process::Server;
use crate::run::scratch;

/// How long a server may take until it answers.
pub(crate) const READY: Duration = Duration::from_secs(10);

/// Over NBD, on a UNIX socket.
#[derive(Debug)]
pub struct Nbd {
    /// What the disk's file is.
    pub image: Image,
}

impl Backend for Nbd {
    fn reach(&self) -> Reach {
        Reach::Nbd
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.ringtap_serve().or_else(|| self.image.missing(env))
    }

    fn image(&self) -> Image {
        self.image
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let socket = context.sockets.join("ringtap.nbd");
        let mut command = serve(context, self.image);
        command.arg("--nbd").arg(format!("unix:{}", socket.display()));
        let mut server = Server::start(command, &context.log)?;
        server.wait_for_socket(&socket, READY, context.stop)?;
        Ok(Served::by(server, nbd_access(&socket)))
    }
}

/// Over vhost-user.
#[derive(Debug)]
pub struct VhostUser {
    /// What the disk's file is.
    pub image: Image,
}

impl Backend for VhostUser {
    fn reach(&self) -> Reach {
        Reach::VhostUser
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        let missing = env.ringtap_serve().or_else(|| env.ringtap_format(self.image.format()));
        missing.or_else(|| self.image.missing(env))
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        by_vhost_user(serve(context, self.image), context)
    }

    fn image(&self) -> Image {
        self.image
    }
}

/// Percent of its service time for which the known-slow arm holds back each answer.
pub(super) const SLOWER: u32 = 20;

/// Over vhost-user on a raw disk, each answer held back: known to be slower.
#[derive(Debug)]
pub struct Slow;

impl Backend for Slow {
    fn reach(&self) -> Reach {
        Reach::VhostUser
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.ringtap_serve()
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let mut command = serve(context, Image::Raw);
        command.arg("--hold").arg(SLOWER.to_string());
        by_vhost_user(command, context)
    }

    fn slow_of(&self) -> Option<&'static str> {
        Some("ringtap-vhost")
    }
}

/// Serves a store by its name over vhost-user; with `hold` each answer is held back by so many percent of its time.
pub(super) fn serve_store(context: &Context<'_>, name: &str, hold: Option<u32>) -> Result<Served> {
    let mut command = Command::new(&context.env.ringtap);
    command.args(["serve", name, "-f", "raw"]);
    if let Some(percent) = hold {
        command.arg("--hold").arg(percent.to_string());
    }
    by_vhost_user(command, context)
}

fn by_vhost_user(mut command: Command, context: &Context<'_>) -> Result<Served> {
    let socket = context.sockets.join("ringtap.vhost");
    command.arg("--vhost-user").arg(&socket);
    let mut server = Server::start(command, &context.log)?;
    server.wait_for_socket_file(&socket, READY, context.stop)?;
    Ok(Served::by(server, Access::VhostUser { socket }))
}

/// As a file by FUSE, with a loop device on top: a block device of this machine without a driver of its own.
#[derive(Debug)]
pub struct FuseLoop;

impl Backend for FuseLoop {
    fn reach(&self) -> Reach {
        Reach::Block
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        let fuse = (!Path::new("/dev/fuse").exists())
            .then(|| Missing::new("this kernel has no FUSE", "modprobe fuse"));
        fuse.or_else(|| env.program("fusermount3", "fuse3"))
            .or_else(|| env.loop_devices())
            .or_else(|| env.ringtap_serve())
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let file = context.sockets.join("ringtap.fuse");
        let mut command = serve(context, Image::Raw);
        command.arg("--fuse").arg(&file);
        // Dropped after the server, should this fail.
        let mount = Mount::expected(&file);
        let mut server = Server::start(command, &context.log)?;
        server.wait_until(&file, READY, context.stop, || mount.there())?;
        let device = LoopDevice::attach(&file, true)?;
        // Should the lab be killed, the server unmounts, and the device no longer says what it lies on.
        let note = file.with_extension(scratch::LOOP_NOTE);
        std::fs::write(&note, device.path().as_os_str().as_encoded_bytes())
            .map_err(Error::file("write", &note))?;
        let access = Access::Block(device.path().to_owned());
        Ok(Served { device: Some(device), mount: Some(mount), ..Served::by(server, access) })
    }

    fn remark(&self) -> Option<&'static str> {
        Some("two more kernel layers, loop and FUSE, above the server: machine CPU has them")
    }
}

fn serve(context: &Context<'_>, image: Image) -> Command {
    let mut command = Command::new(&context.env.ringtap);
    command.arg("serve").arg(context.disk).args(["-f", image.format(), "--cache", "none"]);
    if image == Image::Luks {
        let secret = context.disk.with_file_name(super::SECRET);
        command.arg("--secret").arg(format!("file:{}", secret.display()));
    }
    command
}

/// What is written as `%XX` in a URI.
const IN_URIS: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');

pub(crate) fn nbd_access(socket: &Path) -> Access {
    let path = percent_encode(socket.as_os_str().as_encoded_bytes(), IN_URIS);
    Access::Nbd { uri: format!("nbd+unix:///?socket={path}"), socket: socket.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_paths_survive_in_a_uri() {
        let access = nbd_access(std::path::Path::new("/tmp/a b#2/x.sock"));
        let Access::Nbd { uri, .. } = access else { panic!("{access:?}") };
        assert_eq!(uri, "nbd+unix:///?socket=/tmp/a%20b%232/x.sock");
    }
}
