//! Ringtap, as `ringtap serve`.

use std::process::Command;
use std::time::Duration;

use super::{Access, Backend, Context, Image, Reach, Served};
use crate::env::{Env, Missing};
use crate::error::Result;
use crate::process::Server;

/// How long a server may take until it answers.
pub(crate) const READY: Duration = Duration::from_secs(10);

/// Over NBD, on a UNIX socket.
#[derive(Debug)]
pub struct Nbd;

impl Backend for Nbd {
    fn reach(&self) -> Reach {
        Reach::Nbd
    }

    fn missing(&self, env: &Env) -> Option<Missing> {
        env.ringtap_serve()
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let socket = context.sockets.join("ringtap.nbd");
        let mut command = serve(context, Image::Raw);
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
        env.ringtap_serve().or_else(|| env.ringtap_format(self.image.format()))
    }

    fn start(&self, context: &Context<'_>) -> Result<Served> {
        let socket = context.sockets.join("ringtap.vhost");
        let mut command = serve(context, self.image);
        command.arg("--vhost-user").arg(&socket);
        let mut server = Server::start(command, &context.log)?;
        server.wait_for_socket_file(&socket, READY, context.stop)?;
        Ok(Served::by(server, Access::VhostUser { socket }))
    }

    fn image(&self) -> Image {
        self.image
    }
}

fn serve(context: &Context<'_>, image: Image) -> Command {
    let mut command = Command::new(&context.env.ringtap);
    command.arg("serve").arg(context.disk).args(["-f", image.format(), "--cache", "none"]);
    command
}

pub(crate) fn nbd_access(socket: &std::path::Path) -> Access {
    let path: String = socket
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .map(|&byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            other => format!("%{other:02X}"),
        })
        .collect();
    Access::Nbd { uri: format!("nbd+unix:///?socket={path}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_paths_survive_in_a_uri() {
        let access = nbd_access(std::path::Path::new("/tmp/a b#2/x.sock"));
        assert_eq!(access, Access::Nbd { uri: "nbd+unix:///?socket=/tmp/a%20b%232/x.sock".into() });
    }
}
