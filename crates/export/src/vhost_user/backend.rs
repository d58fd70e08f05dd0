//! The back-end's side of the vhost-user messages of one connection.

mod handover;
mod migration;
mod others;

use std::fs::File;
use std::io;
use std::sync::Arc;

use ringtap_io::OpenFile;
use ringtap_vbd::{Disk, WriteThrough};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};

use super::dirty_log::DirtyLog;
use super::events::{always_readable, event_file, signalled};
use super::inflight::{self, Inflight};
use super::mapping::Maps;
use super::memory::{Memory, Region};
use super::peer::{Peer, SHARE};
use super::residence::{Residence, Waiting};
use super::sources::Sources;
use super::thread::{QueueThread, Start};
use super::told::Told;
use super::virtqueue::{Addresses, MAX_QUEUE_SIZE, Virtqueue};
use super::{Options, config};

/// Regions of a front-end of which it is looked whether they are shared: each look reads the list of all its
/// mappings, and the first are the guest's main memory.
const LOOKS: u32 = 4;
/// Memory regions a front-end may share.
const MOST_REGIONS: usize = 509;

/// What the front-end has said so far, and the queues that run by it.
pub(crate) struct Backend {
    vbd: Disk,
    through: WriteThrough,
    options: Options,
    acked: u64,
    /// The protocol features that the front-end has chosen.
    protocol: u64,
    maps: Maps,
    memory: Arc<Memory>,
    inflight: Option<Inflight>,
    /// What is passed on with the connection: files that memory is mapped of, and where in them.
    sources: Sources,
    /// Where the front-end looks for what is written to its guest's memory while it migrates it.
    log: Option<Arc<DirtyLog>>,
    vrings: Vec<Vring>,
    /// Whether the driver can flush. A guest's firmware often cannot; the kernel after it can.
    flushes: bool,
    /// Whether the guest wants its write cache on.
    cache_wanted: bool,
    peer: Peer,
    told: Arc<Told>,
    /// Of how many regions more it is looked whether it shares them.
    looks: u32,
    /// Where the image may be elsewhere.
    residence: Option<Arc<dyn Residence>>,
    /// Queues are to start, and the image is not here.
    waiting: Option<Waiting>,
    /// The guest has left, and the image has not.
    leaving: Option<Waiting>,
}

#[derive(Default)]
struct Vring {
    size: u16,
    base: u16,
    addresses: Option<Addresses>,
    /// From where on writes to the used ring count in the log.
    log_used: Option<u64>,
    kick: Option<Arc<OpenFile>>,
    call: Option<Arc<OpenFile>>,
    error: Option<Arc<OpenFile>>,
    enabled: bool,
    thread: Option<QueueThread>,
}

fn failed(problem: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::ReqHandlerError(io::Error::other(problem))
}

fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}

impl Backend {
    pub(crate) fn new(vbd: Disk, options: Options) -> Backend {
        let vrings = (0..options.queues).map(|_| Vring::default()).collect();
        let (memory, inflight) = (Arc::default(), None);
        let (flushes, cache_wanted) = (true, true);
        let through = vbd.write_through();
        let (acked, maps, log) = (0, Maps::default(), None);
        Backend {
            vbd,
            through,
            options,
            acked,
            protocol: 0,
            maps,
            memory,
            inflight,
            sources: Sources::default(),
            log,
            vrings,
            flushes,
            cache_wanted,
            peer: Peer::default(),
            told: Arc::default(),
            looks: LOOKS,
            residence: None,
            waiting: None,
            leaving: None,
        }
    }

    /// The same for a front-end that is known.
    pub(crate) fn with_peer(self, peer: Peer) -> Backend {
        Backend { peer, ..self }
    }

    /// The same, which logs no more often than its socket does.
    pub(crate) fn with_told(self, told: Arc<Told>) -> Backend {
        Backend { told, ..self }
    }

    /// A guest whose memory is a private copy waits for ever, and so would whoever looks for the reason.
    fn look_at_sharing(&mut self, region: &VhostUserMemoryRegion, file: &File) {
        if self.looks == 0 {
            return;
        }
        self.looks -= 1;
        if self.peer.keeps_private(file, region.user_addr) {
            self.looks = 0;
            tracing::error!(
                "the front-end, {}, keeps the guest's memory private, and neither sees what the other writes \
                 there: {SHARE}",
                self.peer
            );
        }
    }

    /// Whether the guest is told that its write cache is on.
    fn shows_cache(&self) -> bool {
        self.cache_wanted && !self.vbd.cache().writethrough()
    }

    /// Writes are volatile only for a driver that can flush and a guest that wants them so.
    fn set_cache(&mut self) {
        self.through.set(self.writes_through());
        if let Some(inflight) = &self.inflight {
            inflight.note_write_cache(self.shows_cache());
        }
    }

    fn features(&self) -> u64 {
        let mut bits = vec![
            VIRTIO_F_VERSION_1,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_TOPOLOGY,
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_BLK_F_CONFIG_WCE,
            VIRTIO_BLK_F_MQ,
        ];
        if self.vbd.info().read_only {
            bits.push(VIRTIO_BLK_F_RO);
        } else {
            bits.extend([VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES]);
        }
        let device: u64 = bits.into_iter().map(|bit| 1 << bit).sum();
        device
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
            | VhostUserVirtioFeatures::LOG_ALL.bits()
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        self.vrings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// Start the queue if everything it needs is there.
    fn start(&mut self, index: u32) -> Result<()> {
        let starts = self.vrings.get(index as usize).ok_or(Error::InvalidParam)?;
        if !self.may_start(starts) || self.waiting.is_some() || !self.has_image(None) {
            return Ok(());
        }
        let event_idx = has(self.acked, VIRTIO_RING_F_EVENT_IDX);
        let (memory, inflight) = (self.memory.clone(), self.inflight.clone());
        let identity = config::identity(&self.options.serial);
        let (vbd, peer, logging) = (self.vbd.clone(), self.peer, self.logging(index)?);
        let told = self.told.clone();
        let vring = self.vring(index)?;
        let (Some(addresses), Some(kick)) = (vring.addresses, vring.kick.clone()) else {
            return Ok(());
        };
        if vring.size == 0 {
            return Err(failed(format!("queue {index} is to start, and its size was not told")));
        }
        if memory.regions().is_empty() {
            return Err(failed(format!("it shares no memory with this server: {SHARE}")));
        }
        let number = index as u16;
        let ring = Virtqueue::new(&memory, addresses, vring.size, event_idx, vring.base)
            .map_err(failed)?;
        let inflight = match inflight {
            Some(inflight) => Some(inflight.queue(number, vring.size).ok_or_else(|| {
                let size = vring.size;
                failed(format!("{inflight} has no room for queue {number} of {size} entries"))
            })?),
            None => None,
        };
        let vbd = vbd.fork();
        vbd.serves("vhost-user", peer.to_string(), number);
        let start = Start {
            index: number,
            vbd,
            ring,
            addresses,
            event_idx,
            memory,
            inflight,
            logging,
            kick,
            call: vring.call.clone(),
            error: vring.error.clone(),
            identity,
            told,
        };
        vring.thread = Some(QueueThread::start(start).map_err(failed)?);
        tracing::debug!(queue = number, size = vring.size, base = vring.base, "queue runs");
        Ok(())
    }

    /// Drain and stop the queue.
    fn stop(&mut self, index: u32) -> Result<()> {
        let vring = self.vring(index)?;
        if let Some(thread) = vring.thread.take() {
            vring.base = thread.stop().map_err(failed)?;
            tracing::debug!(queue = index, base = vring.base, "queue stopped");
        }
        Ok(())
    }

    /// Drain and stop every queue.
    pub(crate) fn stop_all(&mut self) {
        for index in 0..self.vrings.len() as u32 {
            if let Err(problem) = self.stop(index) {
                tracing::error!(queue = index, "cannot stop the queue: {problem}");
            }
        }
    }

    fn set_memory(&mut self, regions: Vec<Region>) -> Result<()> {
        self.memory = Arc::new(Memory::new(regions));
        for vring in &self.vrings {
            if let Some(thread) = &vring.thread {
                thread.set_memory(self.memory.clone());
            }
        }
        self.log_anew()
    }
}

impl VhostUserBackendReqHandlerMut for Backend {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.stop_all();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        self.acked = 0;
        (self.inflight, self.log) = (None, None);
        (self.sources.inflight, self.sources.log) = (None, None);
        self.vrings = (0..self.options.queues).map(|_| Vring::default()).collect();
        (self.flushes, self.cache_wanted) = (true, true);
        self.set_cache();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.features();
        if unknown != 0 {
            return Err(failed(format!("features {unknown:#x} were not offered")));
        }
        self.acked = features;
        // virtio 1.2, 5.2.6.2: a driver that cannot flush must not need to.
        self.flushes = has(features, VIRTIO_BLK_F_FLUSH);
        self.set_cache();
        // The one feature that comes and goes while queues run.
        self.log_anew()
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.protocol = features;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        if regions.len() > MOST_REGIONS {
            return Err(Error::InvalidParam);
        }
        let (maps, sources) = (&self.maps, &mut self.sources);
        let map = |(region, file): (_, &File)| {
            Ok(Region::map(region, file, maps)?.of(sources.keep(file)))
        };
        let mapped = regions.iter().zip(&files).map(map).collect::<Result<_>>()?;
        regions.iter().zip(&files).for_each(|(region, file)| self.look_at_sharing(region, file));
        self.set_memory(mapped)?;
        Ok(None)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MOST_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _: Option<bool>,
    ) -> Result<Option<u64>> {
        let mut regions = self.memory.regions().to_vec();
        if regions.len() >= MOST_REGIONS {
            return Err(Error::InvalidParam);
        }
        self.look_at_sharing(region, &file);
        regions.push(Region::map(region, &file, &self.maps)?.of(self.sources.keep(&file)));
        self.set_memory(regions)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let mut regions = self.memory.regions().to_vec();
        let place = regions.iter().position(|one| one.is(region)).ok_or(Error::InvalidParam)?;
        regions.remove(place);
        self.set_memory(regions)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        if num == 0 || num > u32::from(MAX_QUEUE_SIZE) || !num.is_power_of_two() {
            return Err(failed(format!(
                "queue {index} of {num} entries: it must be a power of two up to {MAX_QUEUE_SIZE}"
            )));
        }
        self.vring(index)?.size = num as u16;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let addresses = Addresses { descriptors, available, used };
        let vring = self.vring(index)?;
        vring.addresses = Some(addresses);
        let logged = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG);
        let before = std::mem::replace(&mut vring.log_used, logged.then_some(log));
        if before == vring.log_used { Ok(()) } else { self.log_anew() }
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.vring(index)?.base = base as u16;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.stop(index)?;
        let vring = self.vring(index)?;
        vring.kick = None;
        vring.call = None;
        let base = vring.base.into();
        self.let_go_of_image();
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let index = u32::from(index);
        match file.as_ref().map(always_readable) {
            None => return Err(failed(format!("queue {index} comes without a kick descriptor"))),
            Some(Some(kind)) => {
                return Err(failed(format!(
                    "the kick descriptor of queue {index} is {kind}, which always has something to read: it \
                     must be an eventfd"
                )));
            }
            Some(None) => {}
        }
        self.stop(index)?;
        self.vring(index)?.kick = event_file(file);
        self.start(index)
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let call = signalled(file, "call", index)?;
        let vring = self.vring(index.into())?;
        vring.call = call;
        if let Some(thread) = &vring.thread {
            thread.set_call(vring.call.clone());
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.vring(index.into())?.error = signalled(file, "error", index)?;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.options.queues.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.vring(index)?.enabled = enable;
        if enable { self.start(index) } else { self.stop(index) }
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let space = config::space(&self.vbd, self.options.queues, self.shows_cache());
        let end = u64::from(offset) + u64::from(size);
        let bytes = space.get(offset as usize..end as usize).ok_or(Error::InvalidParam)?;
        Ok(bytes.to_vec())
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        self.cache_wanted = config::write(offset, bytes).ok_or(Error::InvalidParam)?;
        self.set_cache();
        Ok(())
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        if asked.num_queues > self.options.queues || asked.queue_size > MAX_QUEUE_SIZE {
            return Err(Error::InvalidParam);
        }
        let (message, file, inflight) =
            inflight::create(asked.num_queues, asked.queue_size, &self.maps).map_err(failed)?;
        self.inflight = Some(inflight);
        self.sources.inflight = file.try_clone().ok().map(|file| (message, file));
        self.set_cache();
        Ok((message, file))
    }

    fn set_inflight_fd(&mut self, message: &VhostUserInflight, file: File) -> Result<()> {
        let inflight = Inflight::map(message, &file, &self.maps).map_err(failed)?;
        // The guest carries on, and may believe that its writes are stable.
        if inflight.write_cache() == Some(false) {
            self.cache_wanted = false;
        }
        self.inflight = Some(inflight);
        self.sources.inflight = Some((*message, file));
        self.set_cache();
        Ok(())
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("a disk has no GPU socket"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("a disk has no shared objects"))
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("a disk has no state of its own to migrate"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("a disk has no state of its own to migrate"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("a disk shares no memory of its own"))
    }

    fn set_log_base(&mut self, message: &VhostUserLog, file: File) -> Result<()> {
        let log = DirtyLog::map(message, &file, &self.maps).map_err(failed)?;
        self.log = Some(Arc::new(log));
        self.sources.log = Some((*message, file));
        self.log_anew()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringtap_image::{CacheMode, Null};
    use ringtap_vbd::Vbd;

    /// By their bits in virtio 1.2, sections 2.2.1, 5.2.3 and 6, and in vhost-user.rst.
    #[test]
    fn what_is_offered() {
        let of = |bits: &[u32]| bits.iter().map(|bit| 1u64 << bit).sum::<u64>();
        let offer = |read_only| {
            let vbd = Vbd::new(Box::new(Null::new(1 << 30, read_only)), CacheMode::Writeback);
            let mut backend = Backend::new(vbd.into(), Options::default());
            let protocol = backend.get_protocol_features().expect("features");
            (backend.get_features().expect("features"), protocol.bits())
        };
        // SEG_MAX, BLK_SIZE, FLUSH, TOPOLOGY, CONFIG_WCE, MQ; LOG_ALL, INDIRECT_DESC, EVENT_IDX,
        // PROTOCOL_FEATURES, VERSION_1.
        let always = of(&[2, 6, 9, 10, 11, 12, 26, 28, 29, 30, 32]);
        // MQ, LOG_SHMFD, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
        let protocol = of(&[0, 1, 3, 5, 9, 12, 13, 15]);
        // DISCARD and WRITE_ZEROES; or RO.
        assert_eq!(offer(false), (always | of(&[13, 14]), protocol));
        assert_eq!(offer(true), (always | of(&[5]), protocol));
    }

    #[test]
    fn firmware_that_cannot_flush_leaves_the_kernel_its_write_cache() {
        let vbd = Disk::from(Vbd::new(Box::new(Null::new(1 << 30, false)), CacheMode::Writeback));
        let mut backend = Backend::new(vbd.clone(), Options::default());
        let (firmware, kernel) =
            (1 << VIRTIO_F_VERSION_1, 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_BLK_F_FLUSH);
        let turn = |backend: &mut Backend, on: u8| {
            backend.set_config(32, &[on], VhostUserConfigFlags::WRITABLE).expect("it may");
        };
        for cannot_flush in [0, firmware] {
            backend.set_features(cannot_flush).expect("offered");
            assert!(!vbd.write_cache());
        }
        // Another's guest has its say for itself.
        let mut other = Backend::new(vbd.clone(), Options::default());
        other.set_features(kernel).expect("offered");
        assert!(!vbd.write_cache(), "the first cannot flush");
        drop(other);
        assert!(!vbd.write_cache());
        backend.set_features(kernel).expect("offered");
        assert!(vbd.write_cache());
        turn(&mut backend, 0);
        backend.set_features(kernel).expect("offered");
        assert!(!vbd.write_cache(), "the guest turned it off");
        // A server after this one is given the features after what was noted for it.
        let asked = VhostUserInflight::new(0, 0, 1, 256);
        let (message, file) = backend.get_inflight_fd(&asked).expect("a buffer");
        let mut next = Backend::new(vbd.clone(), Options::default());
        next.set_inflight_fd(&message, file).expect("it is the same");
        drop(backend);
        next.set_features(kernel).expect("offered");
        assert!(!vbd.write_cache() && !next.shows_cache());
        turn(&mut next, 1);
        assert!(vbd.write_cache());
    }
}
