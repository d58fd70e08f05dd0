//! Exports and disks that go while others stay.

use ringtap_io::Tasks;

use crate::Error;
use crate::control::ExportDeleted;
use crate::ids::{DiskId, ServerId};
use crate::running::{Event, Export, Running, Served, Then, is_failed};
use crate::threads::spawn;
use crate::transports::Transport;

impl Running {
    /// Begin to take away an export; `then` is done once nothing of it is left. Others of its server go on.
    pub(crate) fn close_export(&mut self, id: &str, then: Then) {
        let Some(export) = self.exports.iter_mut().find(|export| export.id == id) else { return };
        export.closing = true;
        export.when_gone.push(then);
        let (server, name) = (export.server, export.name.clone());
        let others = self.exports.iter().any(|other| other.server == server && !other.closing);
        let Some(serving) = self.servers.get_mut(&server) else { return };
        match &*serving.transport {
            // Others are offered there, or may be.
            Transport::Nbd { server: nbd, keeps_open, .. } if others || *keeps_open => {
                let withdrawn = nbd.withdraw(&name);
                let (events, id) = (self.events.clone(), id.to_owned());
                let waits = spawn("nbd leaves", move || {
                    withdrawn.iter().for_each(|clients| clients.wait());
                    let gone = move |running: &mut Running| running.export_is_gone(&id);
                    let _ = events.send(Event::Do(Box::new(gone)));
                });
                if let Err(error) = waits {
                    tracing::error!("an export is never told to be gone: {error}");
                }
            }
            _ => serving.close(),
        }
    }

    /// Begin to take away a server with all its exports; `then` is done once nothing of it is left.
    pub(crate) fn close_server(&mut self, server: ServerId, then: Then) {
        let of = self.exports.iter_mut().filter(|export| export.server == server);
        of.for_each(|export| export.closing = true);
        if let Some(serving) = self.servers.get_mut(&server) {
            serving.when_gone.push(then);
            serving.close();
        }
    }

    /// Whether it is the end of a server that was told to end, or of one whose disks are all stopped.
    pub(crate) fn expects_end(&self, server: ServerId) -> bool {
        self.servers.get(&server).is_none_or(|serving| serving.closing) || self.all_failed(server)
    }

    /// Whether the end of a server concerns its own disks alone.
    pub(crate) fn was_added(&self, server: ServerId) -> bool {
        self.servers.get(&server).is_some_and(|serving| serving.added)
    }

    /// A server has ended: its exports are gone.
    pub(crate) fn server_ended(&mut self, server: ServerId) {
        let Some(mut serving) = self.servers.remove(&server) else { return };
        serving.join();
        let then = std::mem::take(&mut serving.when_gone);
        // Its socket is removed before anybody is told.
        drop(serving);
        let of = self.exports.iter().filter(|export| export.server == server);
        let ids: Vec<String> = of.map(|export| export.id.clone()).collect();
        ids.iter().for_each(|id| self.export_is_gone(id));
        then.into_iter().for_each(|then| then(self));
    }

    pub(crate) fn export_is_gone(&mut self, id: &str) {
        let Some(place) = self.exports.iter().position(|export| export.id == id) else { return };
        let export = self.exports.remove(place);
        tracing::info!("the export {id} is closed");
        self.told.tell(ExportDeleted { id: export.id });
        export.when_gone.into_iter().for_each(|then| then(self));
    }

    /// The process ends, and with it the exports; those of block devices only where these are not to wait for the
    /// next one.
    pub(crate) fn tell_of_gone_exports(&self, devices: bool) {
        let transport =
            |export: &Export| self.servers.get(&export.server).map(|one| &*one.transport);
        let goes =
            |export: &&Export| devices || !matches!(transport(export), Some(Transport::Ublk(_)));
        for export in self.exports.iter().filter(goes) {
            self.told.tell(ExportDeleted { id: export.id.clone() });
        }
    }

    /// Whether anybody shows a disk.
    pub(crate) fn is_shown(&self, disk: DiskId) -> bool {
        let coming = self.pending.exports.iter().any(|one| one.disk == disk);
        coming || self.exports.iter().any(|export| export.disk == disk)
    }
}

/// Make stable what a disk was given, and close it, where nobody shows it any more. One that a panic has stopped is
/// left as it is.
pub(crate) fn close(served: &Served) -> Result<(), Error> {
    if is_failed(served) {
        return Ok(());
    }
    let failed = |source| Error::Flush { path: served.disk.path.clone(), source };
    let mut tasks = Tasks::new(ringtap_io::reactor().map_err(Error::Ring)?);
    let (vbd, io) = (served.vbd.clone(), tasks.io().clone());
    tasks
        .block_on(async move { vbd.close(&io).await })
        .map_err(|source| Error::Process { tried: "drive the io_uring", source })?
        .map_err(failed)
}
