//! What a back-end does for a guest that is migrated: where its image is, and what is logged meanwhile.

use std::sync::Arc;
use std::time::Duration;

use vhost::vhost_user::Result;
use vhost::vhost_user::message::VhostUserVirtioFeatures;

use super::super::dirty_log::Logging;
use super::super::residence::{Residence, Waiting};
use super::super::virtqueue::used_ring_size;
use super::{Backend, Vring, failed};

/// What is tried again.
const COMES: &str = "the guest waits, its disk is not here yet";
const LEAVES: &str = "the guest has stopped, its disk stays open here and locked";

impl Backend {
    /// The same for a disk whose image may be elsewhere.
    pub(crate) fn with_residence(self, residence: Option<Arc<dyn Residence>>) -> Backend {
        Backend { residence, ..self }
    }

    /// How long until [`Backend::try_again`].
    pub(crate) fn pause(&self) -> Option<Duration> {
        self.waiting.iter().chain(&self.leaving).map(|waiting| waiting.pause).min()
    }

    /// Start the queues that wait for the image, if it can be had now; or let go of it, if it can.
    pub(crate) fn try_again(&mut self) -> Result<()> {
        if self.leaving.is_some() {
            self.let_go_of_image();
        }
        let before = self.waiting.take();
        if !self.vrings.iter().any(|vring| self.may_start(vring)) || !self.has_image(before) {
            return Ok(());
        }
        (0..self.vrings.len() as u32).try_for_each(|index| self.start(index))
    }

    /// Whether the image is here; else queues wait for it from now on.
    pub(super) fn has_image(&mut self, before: Option<Waiting>) -> bool {
        let end = self.residence.as_ref().map_or(Ok(()), |residence| residence.arrive());
        self.waiting = end.err().map(|why| Waiting::after(before, COMES, why));
        self.waiting.is_none()
    }

    /// Whether all that a queue needs from its front-end is there.
    pub(super) fn may_start(&self, vring: &Vring) -> bool {
        let negotiates = self.acked & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0;
        let told = vring.addresses.is_some() && vring.kick.is_some();
        vring.thread.is_none() && told && (vring.enabled || !negotiates)
    }

    /// What a queue logs. A log that has no room for all of it would have the guest arrive with other memory than it
    /// left with.
    pub(super) fn logging(&mut self, index: u32) -> Result<Option<Logging>> {
        let (log, end) = (self.log.clone(), self.memory.end());
        let all = self.logs_all();
        let vring = self.vring(index)?;
        let Some(log) = log else { return Ok(None) };
        let used = vring.log_used;
        let used_end = used.map(|used| used.saturating_add(used_ring_size(vring.size)));
        let needed = used_end.max(all.then_some(end)).unwrap_or(0);
        if needed > log.end() {
            return Err(failed(format!(
                "its migration log is for guest addresses up to {:#x}, and what is written to reaches {needed:#x}",
                log.end()
            )));
        }
        Ok(Logging::new(log, all, used))
    }

    /// Have the queues that run log what they are to log now.
    pub(super) fn log_anew(&mut self) -> Result<()> {
        for index in 0..self.vrings.len() as u32 {
            if self.vring(index)?.thread.is_none() {
                continue;
            }
            let logging = self.logging(index)?;
            if let Some(thread) = &self.vring(index)?.thread {
                thread.set_logging(logging);
            }
        }
        Ok(())
    }

    /// Where the guest has stopped at the end of a migration, its image may go on elsewhere.
    pub(super) fn let_go_of_image(&mut self) {
        let before = self.leaving.take();
        let stopped = self.vrings.iter().all(|vring| vring.thread.is_none());
        if let Some(residence) = self.residence.as_ref().filter(|_| stopped && self.logs_all()) {
            let end = residence.leave();
            self.leaving = end.err().map(|why| Waiting::after(before, LEAVES, why));
        }
    }

    /// Whether the front-end migrates its guest, as far as it has said so.
    fn logs_all(&self) -> bool {
        self.acked & VhostUserVirtioFeatures::LOG_ALL.bits() != 0
    }
}
