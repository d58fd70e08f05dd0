//! Disks whose guests move from host to host: the image is here from when a guest begins until it has gone.
//!
//! Two servers never have it at once: who comes takes its locks, and who leaves has made all stable, closed it and let
//! go of these. What is known of an image is found out anew by who comes.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ringtap_image::{Away, Image, Info, Place, on_a_ring};
use ringtap_io::Panic;
use ringtap_vbd::Disk as Device;

use crate::checkpoints;
use crate::handover::Closing;
use crate::identity::{Identity, identity};
use crate::ids::DiskId;
use crate::opened::{self, Wrap, record_formats};
use crate::successor;
use crate::{Disk, Error};

/// How long requests in flight may take; of a guest that has stopped there are none.
const LIMIT: Duration = Duration::from_secs(10);
/// How long it takes at most to find out whether a disk may leave.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where the image of a disk is.
pub(crate) struct Residence {
    id: DiskId,
    vbd: Device,
    wrap: Wrap,
    host: Box<dyn Host>,
    /// Of the disk whose image its own lies upon, whatever that names.
    upon: Mutex<Option<Arc<Residence>>>,
    state: Mutex<State>,
}

enum State {
    Here,
    /// And how it is opened when it comes.
    Away(Box<Disk>),
}

/// Who serves the disks, as the residence of one sees it.
pub(crate) trait Host: Send + Sync {
    /// The disk is here, opened so.
    fn has_arrived(&self, id: DiskId, disk: Disk, file: Option<Identity>, resized: bool);

    /// It goes on here.
    fn stays(&self, id: DiskId);

    fn has_left(&self, id: DiskId);

    /// Find out whether nobody else has to do with it; from then on nobody may. Why not is told.
    fn ask_to_leave(
        &self,
        id: DiskId,
        with_guest: bool,
        asked: Arc<Mutex<Asked>>,
        tell: Sender<Result<(), String>>,
    );
}

/// Whether a disk may leave, as it is found out by the thread that serves.
pub(crate) enum Asked {
    Waits,
    May(Box<Disk>),
    GivenUp,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Residence {
    /// Of a disk that was opened as is said there.
    pub(crate) fn of(
        id: DiskId,
        disk: &Disk,
        vbd: &Device,
        wrap: &Wrap,
        host: Box<dyn Host>,
    ) -> Arc<Residence> {
        let state = if disk.incoming { State::Away(disk.clone().into()) } else { State::Here };
        let (vbd, wrap, state) = (vbd.clone(), wrap.clone(), Mutex::new(state));
        Arc::new(Residence { id, vbd, wrap, host, upon: Mutex::default(), state })
    }

    /// Its image lies upon that one's, whatever it names.
    pub(crate) fn lies_upon(&self, other: Option<Arc<Residence>>) {
        *lock(&self.upon) = other;
    }

    /// The image stays here after all: what it lies upon is said anew the next time, and is not kept open meanwhile. One that is
    /// being closed, or could not be opened again, is opened upon that yet.
    pub(crate) fn stays(&self) {
        let Ok(state) = self.state.try_lock() else { return };
        if matches!(*state, State::Here) {
            self.lies_upon(None);
        }
    }

    /// The image that its own is opened upon, which is here then.
    fn below(disk: &Disk, upon: Option<&Residence>) -> Result<Option<Box<dyn Image>>, Error> {
        let Some(upon) = upon else { return Ok(None) };
        upon.come(false)?;
        upon.vbd.image().map(Some).map_err(|error| failure(disk)(error.to_string()))
    }

    /// Have the image here.
    pub(crate) fn arrive(&self) -> Result<(), Error> {
        self.come(true)
    }

    fn come(&self, from_afar: bool) -> Result<(), Error> {
        let mut state = lock(&self.state);
        let State::Away(disk) = &*state else { return Ok(()) };
        let mut disk = Disk { incoming: false, ..(**disk).clone() };
        // Its guest is running, be it that no log can be kept here: that is warned of.
        let needs_log = std::mem::take(&mut disk.options.needs_log);
        let _disk = self.vbd.span().enter();
        let before = self.vbd.size();
        let mut disk = self.open(disk, from_afar)?;
        disk.options.needs_log = needs_log;
        *state = State::Here;
        // That is said anew where it is closed for another process: it may lie upon something else by then.
        self.lies_upon(None);
        let how = if disk.options.read_only { "" } else { " for writing" };
        tracing::info!("the disk is here: {} is open{how}", disk.path.display());
        // At once: another file may be at its path when that is heard.
        let file = identity(&disk.path);
        let (id, resized) = (self.id, before != self.vbd.size());
        self.host.has_arrived(id, disk, file, resized);
        Ok(())
    }

    /// Have the image here that another process of this host had, which closed it.
    pub(crate) fn take_over(&self) -> Result<(), Error> {
        self.come(false)
    }

    /// Close the image, which the next process of this host opens; nobody else has to do with the disk. Where that is not
    /// waited for any more by then, it is opened again here before requests go on.
    pub(crate) fn hand_over(&self, disk: &Disk, closing: &Closing) -> Result<(), Error> {
        let mut state = lock(&self.state);
        let _disk = self.vbd.span().enter();
        if self.put_away_for(disk, self.vbd.size(), Some(closing.clone()))? {
            self.vbd.forget_bitmaps();
            *state = State::Away(disk.clone().into());
        }
        Ok(())
    }

    /// A disk whose image was closed too late for another process is as it was.
    pub(crate) fn goes_on(&self) {
        self.stays();
        let id = self.id;
        self.host.stays(id);
    }

    /// Open the image, and let it be the disk; how it was opened.
    fn open(&self, mut disk: Disk, from_afar: bool) -> Result<Disk, Error> {
        // A process of this host that had it until now has seen to where the disk goes on, and to what a killed one left.
        if from_afar {
            successor::follow(&mut disk)?;
            opened::forget_pages(&disk);
        }
        let place = Place::hold(&disk.path).unwrap_or_else(|_| (&disk.path).into());
        let upon = lock(&self.upon).clone().filter(|_| !from_afar);
        let below = Residence::below(&disk, upon.as_deref())?;
        let opened = Panic::catch(|| opened::image(&disk, &self.wrap, &place, below));
        let opened = opened.unwrap_or_else(|panic| Err(Error::panicked([&*disk.path], &panic)));
        let image = opened?;
        opened::sectors_fit(&disk, image.info().size)?;
        let (named, before) = (opened::named(&disk, place, &*image), self.vbd.size());
        self.put(&disk, image)?;
        if from_afar && !self.vbd.is_read_only() {
            successor::take_back(&disk.path);
        }
        if let Err(error) = checkpoints::restore(&self.vbd) {
            self.put_away(&disk, before)?;
            return Err(error);
        }
        record_formats(named.as_slice());
        Ok(disk)
    }

    /// Let an image be the disk; what was it before is closed already.
    fn put(&self, disk: &Disk, image: Box<dyn Image>) -> Result<(), Error> {
        let (vbd, failed) = (self.vbd.clone(), failure(disk));
        on_a_ring(&disk.path, |io| async move {
            let vbd = vbd.fork();
            let still = vbd.quiesce(&io, LIMIT.as_nanos() as u64).await;
            let still = still.map_err(|busy| failed(busy.to_string()))?;
            still.come_back(image).map(drop).map_err(|error| failed(error.to_string()))
        })?
    }

    /// Close the image, and keep only what it looks like, and that it had `size` bytes.
    fn put_away(&self, disk: &Disk, size: u64) -> Result<(), Error> {
        self.put_away_for(disk, size, None).map(drop)
    }

    /// The same for the `next` process of this host, if that is who has it then; false where nobody waits for that any more
    /// once it is closed, and it could be opened again before a request goes on.
    fn put_away_for(&self, disk: &Disk, size: u64, next: Option<Closing>) -> Result<bool, Error> {
        let (vbd, failed) = (self.vbd.clone(), failure(disk));
        let (own, wrap, upon) = (disk.clone(), self.wrap.clone(), lock(&self.upon).clone());
        let again = move || {
            let place = Place::hold(&own.path).unwrap_or_else(|_| (&own.path).into());
            let below = Residence::below(&own, upon.as_deref())?;
            Panic::catch(|| opened::image(&own, &wrap, &place, below))
                .unwrap_or_else(|panic| Err(Error::panicked([&*own.path], &panic)))
        };
        let away = move |info: &Info| Box::new(Away::new(Info { size, ..info.clone() }));
        on_a_ring(&disk.path, |io| async move {
            let wrong = |error: ringtap_image::Error| failed(error.to_string());
            let vbd = vbd.fork();
            let still = vbd.quiesce(&io, LIMIT.as_nanos() as u64).await;
            let still = still.map_err(|busy| failed(busy.to_string()))?;
            let image = still.image().map_err(wrong)?;
            if next.is_some() {
                image.opens_again();
            }
            // All that was acknowledged is stable before anybody else may have it.
            vbd.disk().close(&io).await.map_err(|error| failed(error.to_string()))?;
            let former = still.come_back(away(image.info())).map_err(wrong)?;
            // This process has no other handle of it: its locks go now.
            former.stop_writing();
            former.let_write(true);
            drop(former);
            if next.is_none_or(|closing| closing.is_waited_for()) {
                return Ok(true);
            }
            let back = again().and_then(|image| {
                still.come_back(image).map_err(wrong)?;
                vbd.disk().forget_bitmaps();
                checkpoints::restore(vbd.disk())
            });
            let Err(error) = back else { return Ok(false) };
            tracing::error!("the image cannot be opened again: {error}");
            still.come_back(away(image.info())).map_err(wrong)?;
            Ok(true)
        })?
    }

    /// Let go of the image; whether it is away then.
    /// Its guest may still be connected, where it has stopped.
    pub(crate) fn leave(&self, with_guest: bool) -> Result<(), Error> {
        let mut state = lock(&self.state);
        if matches!(*state, State::Away(_)) {
            return Ok(());
        }
        let _disk = self.vbd.span().enter();
        let disk = self.may_leave(with_guest)?;
        let id = self.id;
        match self.put_away(&disk, self.vbd.size()) {
            Ok(()) => {
                tracing::info!("the disk has left: {} is closed", disk.path.display());
                // What is kept of the image is found again with it.
                self.vbd.forget_bitmaps();
                *state = State::Away(disk);
                self.host.has_left(id);
                Ok(())
            }
            Err(error) => {
                self.host.stays(id);
                Err(error)
            }
        }
    }

    /// Ask the thread that serves whether nobody else has to do with the disk; from then on nobody may.
    fn may_leave(&self, with_guest: bool) -> Result<Box<Disk>, Error> {
        let (tell, told) = channel();
        let (asked, id) = (Arc::new(Mutex::new(Asked::Waits)), self.id);
        self.host.ask_to_leave(id, with_guest, asked.clone(), tell);
        let refused = told.recv_timeout(PATIENCE).ok().and_then(Result::err);
        if let Some(why) = refused {
            return Err(Error::Stays(why));
        }
        match std::mem::replace(&mut *lock(&asked), Asked::GivenUp) {
            Asked::May(disk) => Ok(disk),
            _ => Err(Error::Stays("the server is busy".into())),
        }
    }
}

fn failure(disk: &Disk) -> impl Fn(String) -> Error + use<> {
    let path = disk.path.clone();
    move |why| Error::Moves { path: path.clone(), why }
}

impl ringtap_export::vhost_user::Residence for Residence {
    fn arrive(&self) -> Result<(), String> {
        Residence::arrive(self).map_err(|error| error.to_string())
    }

    fn leave(&self) -> Result<(), String> {
        // Where it stays nobody else can have it: the guest goes on here, or waits there.
        Residence::leave(self, true).map_err(|error| error.to_string())
    }
}
