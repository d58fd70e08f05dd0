//! The NBD server that a client starts, for exports that come then.

use ringtap_export::nbd::Listener;

use super::command::Command;
use super::exports::{UnixAddress, WAITED_FOR};
use super::outgoing::Reply;
use super::refusal::Refusal;
use super::shape::{Done, arguments, choice};
use crate::handed::Handed;
use crate::handover::NbdComes;
use crate::ids::ServerId;
use crate::plan::{self, listen};
use crate::running::{Running, Then};
use crate::socket::SocketFile;
use crate::start::NbdSocket;
use crate::tls::NamedCredentials;
use crate::transports::Transport;
use crate::{Address, Error, TlsMode};

arguments! {
    /// A UNIX socket, where an address is of the older form.
    struct UnixData { "data" data: UnixAddress }
}

arguments! {
    /// A TCP port.
    struct InetAddress { "host" host: String, "port" port: String }
}

arguments! {
    /// A TCP port, where an address is of the older form.
    struct InetData { "data" data: InetAddress }
}

choice! {
    /// Where NBD clients connect.
    struct NbdAddress {}
    "type" enum NbdAddressType { "unix" Unix(UnixData), "inet" Inet(InetData) }
}

arguments! {
    /// `nbd-server-start`
    struct StartNbd {
        "addr" addr: NbdAddress,
        /// Certificates, by their id: with them no client is served that does not speak TLS.
        "tls-creds" tls_creds: Option<String>,
        /// The most clients at a time; 0: as many as the server takes at any socket.
        "max-connections" max_connections: Option<u32>,
    }
}

impl Command for StartNbd {
    const NAME: &'static str = "nbd-server-start";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        if running.nbd_server().is_ok() || running.pending.nbd {
            return reply.give(Err(Refusal::new("NBD server already running")));
        }
        let address = match self.addr.of {
            NbdAddressType::Unix(UnixData { data }) => Address::Unix(data.path.into()),
            NbdAddressType::Inet(InetData { data }) => {
                let Ok(port) = data.port.parse() else {
                    let text = format!("{:?} is not a port number", data.port);
                    return reply.give(Err(Refusal::new(text)));
                };
                Address::Tcp { host: data.host, port }
            }
        };
        let named = self.tls_creds.map(|id| running.tls_of_server(&id).map(|named| (id, named)));
        let creds = match named.transpose() {
            Ok(creds) => creds,
            Err(refusal) => return reply.give(Err(refusal)),
        };
        let most = self.max_connections.filter(|most| *most > 0);
        let mode = running.config.socket_mode;
        running.pending.nbd = true;
        // A host's name may take long to be found.
        let begun = running.in_time("nbd", move || -> Then {
            let bound = listen(&address, mode, &mut Handed::default());
            Box::new(move |running| {
                running.pending.nbd = false;
                let started =
                    bound.and_then(|bound| running.nbd_listens(&address, bound, creds, most));
                reply.give(started.map(|_| Done {}).map_err(Refusal::from));
            })
        });
        if let Err(error) = begun {
            running.pending.nbd = false;
            tracing::error!("cannot start an NBD server: {error}");
        }
    }
}

/// The sockets that it listens at.
type Bound = (Vec<Listener>, Option<SocketFile>);

impl Running {
    /// Whether there is an NBD server that was started by a client.
    pub(super) fn has_nbd_server(&self) -> bool {
        self.nbd_server().is_ok()
    }

    /// The NBD server that was started by a client of the control socket.
    pub(crate) fn nbd_server(&self) -> Result<ServerId, Refusal> {
        let keeps_open =
            |transport: &Transport| matches!(transport, Transport::Nbd { keeps_open: true, .. });
        let found = self.servers.iter().find(|(_, one)| keeps_open(&one.transport) && !one.closing);
        found.map(|(id, _)| *id).ok_or_else(|| Refusal::new("NBD server not running"))
    }

    fn nbd_listens(
        &mut self,
        address: &Address,
        bound: Bound,
        creds: Option<(String, NamedCredentials)>,
        most: Option<u32>,
    ) -> Result<ServerId, Error> {
        let own = self.config.nbd_tls.as_ref();
        let tls = match creds {
            Some(_) => TlsMode::Require,
            None => own.map_or(TlsMode::Off, |tls| tls.mode_of(address)),
        };
        (self.nbd_creds, self.nbd_most) = (creds, most);
        let ((listeners, file), require) = (bound, tls == TlsMode::Require);
        let places = listeners.iter().map(|one| (plan::place(one), require)).collect();
        let (tls, files) = (vec![tls; listeners.len()], file.into_iter().collect());
        // Disks of the command line that come late do not join it.
        let (addresses, keeps_open) = (vec![], true);
        let socket = NbdSocket { addresses, places, listeners, tls, files, keeps_open };
        self.start_nbd_server(socket, vec![], None)
    }

    /// Go on with the one that the server before this one had, if it had one: before its exports come.
    pub(crate) fn nbd_goes_on(&mut self) {
        let Some(NbdComes { address, creds, most }) = self.pending.nbd_comes.take() else { return };
        let mode = self.config.socket_mode;
        let bound = listen(&address, mode, &mut Handed::default());
        if let Err(error) = bound.and_then(|bound| self.nbd_listens(&address, bound, creds, most)) {
            tracing::error!("cannot go on with the NBD server at {address}: {error}");
        }
    }
}

arguments! {
    /// `nbd-server-stop`
    struct StopNbd {}
}

impl Command for StopNbd {
    const NAME: &'static str = "nbd-server-stop";
    type Answer = Done;

    fn run(self, running: &mut Running, reply: Reply<Done>) {
        match running.nbd_server() {
            Err(refusal) => reply.give(Err(refusal)),
            Ok(server) => {
                running.forget_exports_of(server);
                reply.give_after(WAITED_FOR, Done {});
                running.close_server(server, Box::new(|_| reply.give(Ok(Done {}))));
            }
        }
    }
}
