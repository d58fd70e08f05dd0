//! From what a frontend writes into xenstore to threads that serve its rings.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use ringtap_vbd::Disk;

use super::evtchn::Port;
use super::gntdev::{Foreign, Gntdev};
use super::nodes::MOST_RING_ORDER;
use super::record::Record;
use super::ring::{BackRing, places};
use super::thread::{QueueThread, Start};
use super::wire::Abi;
use super::xenstore::{Store, StoreError};

/// Where what is in flight is noted: only there for this boot.
pub(crate) const RECORDS: &str = "/run/ringtap/xen";
/// Pages that one ring keeps mapped: three times what its requests can name at once, where they are
/// not indirect.
const KEPT_FOR_EACH_PLACE: u32 = 33;
/// No more than that, however long the ring.
const MOST_KEPT: u32 = 4096;

/// Why a frontend cannot be connected to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What the frontend wrote makes no sense.
    #[error("the frontend's {node} is {found:?}: {wanted}")]
    Node { node: String, found: Option<String>, wanted: String },
    #[error("cannot {tried} of domain {domain}: {source}")]
    Os { tried: String, domain: u16, source: io::Error },
    /// A killed server's record is not there.
    #[error(
        "cannot take up what a server before this one left in flight, by {}: {source}; \
         the guest's requests wait for ever: restart the guest",
        path.display()
    )]
    Record { path: PathBuf, source: io::Error },
}

impl ConnectError {
    /// Whether it is the frontend's own doing, or the connection's end anyway.
    pub(crate) fn ends_connection(&self) -> bool {
        !matches!(self, ConnectError::Record { .. } | ConnectError::Store(_))
    }

    /// Whether it is this host's trouble, which may be over later: a killed server's event channels may be
    /// taken until its io_uring is down.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, ConnectError::Os { .. } | ConnectError::Store(_))
    }
}

/// How a connection is served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// Pages may stay mapped.
    pub(crate) persistent: bool,
    pub(crate) discards: bool,
    /// A server before this one served the rings.
    pub(crate) take_over: bool,
}

/// One ring as the frontend describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RingNodes {
    grants: Vec<u32>,
    port: u32,
}

/// What a frontend wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Connection {
    domain: u16,
    abi: Abi,
    persistent: bool,
    rings: Vec<RingNodes>,
    /// Tells this connection from every other of this boot.
    identity: String,
}

fn wrong(node: &str, found: Option<String>, wanted: &str) -> ConnectError {
    ConnectError::Node { node: node.to_owned(), found, wanted: wanted.to_owned() }
}

fn number(store: &mut Store, front: &str, node: &str) -> Result<u32, ConnectError> {
    let found = store.read(&format!("{front}/{node}"))?;
    let number = found.as_deref().and_then(|text| text.trim().parse().ok());
    number.ok_or_else(|| wrong(node, found, "it must be a number"))
}

fn number_or(store: &mut Store, front: &str, node: &str, or: u32) -> Result<u32, ConnectError> {
    match store.read(&format!("{front}/{node}"))? {
        None => Ok(or),
        Some(_) => number(store, front, node),
    }
}

impl Connection {
    /// Read what the frontend at `front` wrote.
    pub(crate) fn read(
        store: &mut Store,
        front: &str,
        domain: u16,
        most_queues: u16,
    ) -> Result<Connection, ConnectError> {
        let protocol = store.read(&format!("{front}/protocol"))?;
        let abi = Abi::named(protocol.as_deref());
        let abi =
            abi.ok_or_else(|| wrong("protocol", protocol, "no layout of that name is known"))?;
        let queues = number_or(store, front, "multi-queue-num-queues", 1)?;
        if queues == 0 || queues > most_queues.into() {
            let wanted = format!("it must be from 1 to {most_queues}");
            return Err(wrong("multi-queue-num-queues", Some(queues.to_string()), &wanted));
        }
        let order = number_or(store, front, "ring-page-order", 0)?;
        if order > MOST_RING_ORDER {
            let wanted = format!("it must be {MOST_RING_ORDER} at most");
            return Err(wrong("ring-page-order", Some(order.to_string()), &wanted));
        }
        let mut rings = vec![];
        for queue in 0..queues {
            let below = if queues == 1 { String::new() } else { format!("queue-{queue}/") };
            let mut grants = vec![];
            if order == 0 {
                grants.push(number(store, front, &format!("{below}ring-ref"))?);
            } else {
                for page in 0..1 << order {
                    grants.push(number(store, front, &format!("{below}ring-ref{page}"))?);
                }
            }
            let port = number(store, front, &format!("{below}event-channel"))?;
            rings.push(RingNodes { grants, port });
        }
        let persistent = number_or(store, front, "feature-persistent", 0)? == 1;
        let vm = store.read(&format!("/local/domain/{domain}/vm"))?.unwrap_or_default();
        let mut identity = format!("{domain} {vm} {front}");
        for RingNodes { grants, port } in &rings {
            // Another version of this program must find the same. Writing to a String cannot fail.
            let _ = write!(identity, " {port}");
            grants.iter().for_each(|grant| _ = write!(identity, ",{grant}"));
        }
        Ok(Connection { domain, abi, persistent, rings, identity })
    }

    /// One line for the log. `persistent` is what this side offered.
    pub(crate) fn line(&self, persistent: bool) -> String {
        let Connection { abi, rings, .. } = self;
        let pages = rings.first().map_or(0, |ring| ring.grants.len());
        let pages_again = if persistent && self.persistent { "persistent" } else { "changing" };
        format!("{} ring(s) of {pages} page(s), {abi:?} layout, {pages_again} grants", rings.len())
    }

    /// Serve the rings, as was offered.
    pub(crate) fn serve(
        &self,
        name: &str,
        vbd: &Disk,
        offer: Offer,
    ) -> Result<Vec<QueueThread>, ConnectError> {
        let mut starts = vec![];
        // All are mapped before the first is served, so that one bad ring leaves nothing half done.
        for (queue, ring) in self.rings.iter().enumerate() {
            let name = format!("{name}q{queue}");
            starts.push(self.prepare(name, ring, vbd, offer)?);
        }
        let mut threads: Vec<QueueThread> = vec![];
        for start in starts {
            match QueueThread::start(start) {
                Ok(thread) => threads.push(thread),
                Err(source) => {
                    threads.iter().for_each(QueueThread::stop);
                    threads.into_iter().for_each(QueueThread::join);
                    return Err(self.failed("start a thread for a ring", source));
                }
            }
        }
        Ok(threads)
    }

    fn failed(&self, tried: &str, source: io::Error) -> ConnectError {
        ConnectError::Os { tried: tried.to_owned(), domain: self.domain, source }
    }

    fn prepare(
        &self,
        name: String,
        ring: &RingNodes,
        vbd: &Disk,
        offer: Offer,
    ) -> Result<Start, ConnectError> {
        let Offer { persistent, discards, take_over } = offer;
        let gntdev = Gntdev::open(self.domain);
        let gntdev =
            gntdev.map_err(|source| self.failed("open /dev/xen/gntdev for a ring", source))?;
        let pages = gntdev.map(&ring.grants).map_err(|source| {
            self.failed(&format!("map the ring granted as {:?}", ring.grants), source)
        })?;
        let entries = places(pages.count(), self.abi);
        let path = Path::new(RECORDS).join(&name);
        let mut record = match take_over {
            true => {
                let record = Record::open(&path, entries, &self.identity);
                Some(record.map_err(|source| ConnectError::Record { path, source })?)
            }
            false => match Record::create(&path, entries, &self.identity) {
                Ok(record) => Some(record),
                Err(error) => {
                    tracing::warn!(
                        "cannot note in {} what is in flight: {error}; \
                         should this server be killed, the guest must be restarted",
                        path.display()
                    );
                    None
                }
            },
        };
        let back = BackRing::new(pages, self.abi);
        let left = match &mut record {
            Some(record) => record.take_up(back.published()),
            None => vec![],
        };
        let port = Port::bind(self.domain, ring.port).map_err(|source| {
            self.failed(&format!("bind to the event channel {}", ring.port), source)
        })?;
        let kept = match persistent && self.persistent {
            true => (back.size() * KEPT_FOR_EACH_PLACE).min(MOST_KEPT) as usize,
            false => 0,
        };
        let vbd = vbd.fork();
        vbd.serves("xen", format!("domain {}", self.domain), 0);
        let ring = back.with_left(left.len() as u32);
        Ok(Start { name, vbd, ring, port, gntdev, kept, discards, record, left, take_over })
    }
}
