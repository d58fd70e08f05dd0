//! What another back-end has to be told to go on where this one is.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ringtap_io::OpenFile;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVringAddrFlags};

use super::super::handover::{Connection, Message};
use super::{Backend, Vring};

/// Requests by number (vhost-user.rst, "Front-end message types").
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_LOG_BASE: u32 = 6;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_CONFIG: u32 = 25;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;
/// Where the write cache is in the configuration space, and that the driver writes there.
const WRITE_CACHE: [u32; 3] = [32, 1, 1];
/// Regions that one table holds.
const TABLE: usize = 8;

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn halves(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_ne_bytes()).collect()
}

fn message(request: u32, payload: Vec<u8>) -> Message {
    Message { request, payload, files: vec![] }
}

fn copy(file: impl AsFd) -> io::Result<OwnedFd> {
    file.as_fd().try_clone_to_owned()
}

impl Backend {
    /// The connection, for another server. No queue runs.
    pub(crate) fn leave(
        &self,
        socket: UnixStream,
        requests: Option<UnixStream>,
    ) -> io::Result<Connection> {
        let (socket, requests) = (socket.into(), requests.map(Into::into));
        Ok(Connection { socket, requests, messages: self.messages()? })
    }

    /// What brings a fresh back-end where this one is; of queues that run as if they stood still.
    pub(crate) fn messages(&self) -> io::Result<Vec<Message>> {
        let mut all = vec![message(SET_OWNER, vec![]), message(GET_FEATURES, vec![])];
        if self.protocol != 0 {
            // They are for who has said that there are such; what it has said since follows.
            let negotiates = self.acked | 1 << 30;
            all.push(message(SET_FEATURES, words(&[negotiates])));
            all.push(message(GET_PROTOCOL_FEATURES, vec![]));
            all.push(message(SET_PROTOCOL_FEATURES, words(&[self.protocol])));
        }
        if self.acked != 0 {
            all.push(message(SET_FEATURES, words(&[self.acked])));
        }
        self.memory_messages(&mut all)?;
        if let Some((said, file)) = &self.sources.inflight {
            let queues = u64::from(said.num_queues) | u64::from(said.queue_size) << 16;
            let payload = words(&[said.mmap_size, said.mmap_offset, queues]);
            all.push(Message { files: vec![copy(file)?], ..message(SET_INFLIGHT_FD, payload) });
        }
        if !self.cache_wanted && self.protocol & VhostUserProtocolFeatures::CONFIG.bits() != 0 {
            all.push(message(SET_CONFIG, [halves(&WRITE_CACHE), vec![0]].concat()));
        }
        if let Some((said, file)) = &self.sources.log {
            let payload = words(&[said.mmap_size, said.mmap_offset]);
            all.push(Message { files: vec![copy(file)?], ..message(SET_LOG_BASE, payload) });
        }
        for (index, vring) in (0..).zip(&self.vrings) {
            vring.messages(index, &mut all)?;
        }
        Ok(all)
    }

    fn memory_messages(&self, all: &mut Vec<Message>) -> io::Result<()> {
        let described = |(at, file): ([u64; 4], Option<&File>)| match file {
            Some(file) => Ok((at, copy(file)?)),
            None => Err(io::Error::other(
                "its front-end shares memory of more files than are kept to be passed on",
            )),
        };
        let regions = self.memory.regions().iter().map(|region| described(region.source()));
        let regions: Vec<([u64; 4], OwnedFd)> = regions.collect::<io::Result<_>>()?;
        let slots = VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS.bits();
        if self.protocol & slots != 0 {
            all.extend(regions.into_iter().map(|(at, file)| {
                let payload = [words(&[0]), words(&at)].concat();
                Message { files: vec![file], ..message(ADD_MEM_REG, payload) }
            }));
        } else if !regions.is_empty() {
            if regions.len() > TABLE {
                return Err(io::Error::other(
                    "its front-end's table of memory has too many regions",
                ));
            }
            let (places, files): (Vec<_>, Vec<_>) = regions.into_iter().unzip();
            let head = halves(&[places.len() as u32, 0]);
            let payload = [head, words(&places.concat())].concat();
            all.push(Message { files, ..message(SET_MEM_TABLE, payload) });
        }
        Ok(())
    }
}

impl Vring {
    fn messages(&self, index: u32, all: &mut Vec<Message>) -> io::Result<()> {
        if self.size == 0 {
            return Ok(());
        }
        all.push(message(SET_VRING_NUM, halves(&[index, self.size.into()])));
        all.push(message(SET_VRING_BASE, halves(&[index, self.base.into()])));
        if let Some(addresses) = self.addresses {
            let flags =
                self.log_used.map_or(0, |_| VhostUserVringAddrFlags::VHOST_VRING_F_LOG.bits());
            let head = halves(&[index, flags]);
            let at = [addresses.descriptors, addresses.used, addresses.available];
            let log = self.log_used.unwrap_or(0);
            let payload = [head, words(&at), words(&[log])].concat();
            all.push(message(SET_VRING_ADDR, payload));
        }
        let mut event = |request, file: &Option<std::sync::Arc<OpenFile>>| {
            let Some(file) = file else { return Ok::<(), io::Error>(()) };
            let files = vec![copy(&**file)?];
            all.push(Message { files, ..message(request, words(&[index.into()])) });
            Ok(())
        };
        event(SET_VRING_CALL, &self.call)?;
        event(SET_VRING_ERR, &self.error)?;
        event(SET_VRING_KICK, &self.kick)?;
        if self.enabled {
            all.push(message(SET_VRING_ENABLE, halves(&[index, 1])));
        }
        Ok(())
    }
}
