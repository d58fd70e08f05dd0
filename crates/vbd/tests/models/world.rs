//! An image on a simulated disk, served by threads, and what others would find of it at any step.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use ringtap_image::qcow2::{self, CreateOptions, Header, Parts, Qcow2, Repair, Sabotage, check};
use ringtap_image::{CacheMode, Container, Identity, Image, Raw, RestartLog, Traits, vhd};
use ringtap_io::{File, Io};
use ringtap_sim::threads::{JoinHandle, alone, choose, spawn};
use ringtap_sim::{Disk, Lacks};
use ringtap_vbd::{Error, Kind, Request, Vbd};

/// Records of the restart log between flushes.
const NOTES: u64 = 64;

/// What the image is.
#[derive(Clone, Debug)]
pub enum Format {
    Qcow2(CreateOptions),
    Vhd { size: u64, block: u32 },
    Raw { size: u64 },
}

/// How a server of the image ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    PowerCut,
    Kill,
}

/// What a guest knows of a range: its bytes are all this.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    pub offset: u64,
    pub len: u64,
    pub value: u8,
}

/// What somebody would find if the server ended at some step.
struct Outcome {
    end: End,
    disk: Disk,
    words: Arc<[AtomicU64]>,
    known: Vec<Known>,
}

#[derive(Clone)]
pub struct World {
    pub disk: Disk,
    file: File,
    traits: Traits,
    format: Format,
    words: Arc<[AtomicU64]>,
    /// A power cut ends it.
    boot: u128,
    pub sabotage: Option<Sabotage>,
    outcomes: Arc<Mutex<Vec<Outcome>>>,
}

fn copy(words: &[AtomicU64]) -> Arc<[AtomicU64]> {
    words.iter().map(|word| AtomicU64::new(word.load(SeqCst))).collect()
}

fn blank() -> Arc<[AtomicU64]> {
    (0..RestartLog::words_for(NOTES)).map(|_| AtomicU64::new(0)).collect()
}

/// qcow2 with clusters of so many bytes.
pub fn qcow2(size: u64, cluster_size: u64, extended_l2: bool) -> Format {
    Format::Qcow2(CreateOptions { size, cluster_size, extended_l2, ..CreateOptions::default() })
}

impl World {
    /// An image that was just made, in a file that has to be written in blocks of so many bytes. With
    /// `punches` no hole is punched in it: what was freed keeps its bytes.
    pub fn new(format: Format, align: u64, punches: bool) -> World {
        let disk = Disk::new(512);
        let file = disk.add_file(0, align as usize);
        disk.set_lacks(file, Lacks { punch: !punches, ..Lacks::default() });
        let traits = Traits {
            request_alignment: align,
            memory_alignment: align.min(512) as usize,
            ..Traits::FILE
        };
        let (words, outcomes) = (blank(), Arc::default());
        let (boot, sabotage) = (1, None);
        let world = World { disk, file, traits, format, words, boot, sabotage, outcomes };
        let made = world.clone();
        alone(&world.disk, async move |io| {
            let container = made.container();
            match &made.format {
                Format::Qcow2(options) => {
                    qcow2::create(&io, &container, None, options).await.expect("an image");
                }
                Format::Vhd { size, block } => {
                    let options = vhd::CreateOptions {
                        size: *size,
                        kind: vhd::Kind::Dynamic,
                        force_size: true,
                        block_size: Some(*block),
                        parent: None,
                        id: Some([1; 16]),
                    };
                    vhd::create(&io, &container, &options).await.expect("an image");
                }
                Format::Raw { size } => {
                    container.set_len(&io, *size).await.expect("a file");
                    container.sync(&io).await.expect("stable");
                }
            }
        });
        world
    }

    fn container(&self) -> Container {
        let (disk, file) = (self.disk.clone(), self.file);
        let container = Container::simulated(file, disk.size(file), self.traits);
        container.with_time(move || disk.modified(file))
    }

    async fn open_image(&self, io: &Io) -> Box<dyn Image> {
        let identity = Identity { boot: self.boot, file: (2, 3) };
        let container = self.container();
        self.disk.watch(self.file, container.witness().clone());
        let log = RestartLog::with(Arc::new(self.words.clone()), identity, u64::MAX);
        let log = log.of(&container);
        match self.format {
            Format::Qcow2(_) => {
                let header = Header::read(io, &container).await.expect("a header");
                let (table_memory, sabotage) = (Some(0), self.sabotage);
                let restart = Some(log);
                let parts = Parts { restart, table_memory, sabotage, ..Parts::default() };
                let image = Qcow2::open(io, container, header, parts).await;
                Box::new(image.expect("the image opens"))
            }
            Format::Vhd { .. } => {
                let image = vhd::open_in_with(io, container, None, Some(log)).await;
                image.expect("the image opens")
            }
            Format::Raw { .. } => Box::new(Raw::new(container)),
        }
    }

    /// Have the first two entries of the L1 table of a qcow2 image name no tables that there can be.
    pub fn refer_to_nowhere(&self) {
        let mut table = [0; 8];
        self.disk.peek(self.file, 40, &mut table);
        let entries = [0x201_u64; 2].map(u64::to_be_bytes).concat();
        self.disk.poke(self.file, u64::from_be_bytes(table), &entries);
    }

    /// The image, served.
    pub fn open(&self) -> Vbd {
        let world = self.clone();
        let image = alone(&self.disk, async move |io| world.open_image(&io).await);
        Vbd::new(image, CacheMode::None)
    }

    /// Another queue thread.
    pub fn thread<F: Future<Output = ()> + 'static>(
        &self,
        vbd: &Vbd,
        task: impl FnOnce(Vbd, Io) -> F + Send + 'static,
    ) -> JoinHandle<()> {
        let (vbd, disk) = (vbd.fork(), self.disk.clone());
        spawn(move || alone(&disk, |io| task(vbd, io)))
    }

    /// The server ends at this very step: whoever opens the image then has to find what is known. Looked at by
    /// [`World::look`].
    pub fn end_here(&self, end: End, known: &[Known]) {
        let (disk, words) = match end {
            End::PowerCut => (self.disk.after_power_cut(choose()), blank()),
            End::Kill => (self.disk.after_kill(choose()), copy(&self.words)),
        };
        let known = known.to_vec();
        let mut outcomes = self.outcomes.lock().expect("no panic");
        outcomes.push(Outcome { end, disk, words, known });
    }

    /// Open all that would have been found, when no thread is at it any more.
    pub fn look(&self) {
        for outcome in std::mem::take(&mut *self.outcomes.lock().expect("no panic")) {
            let Outcome { end, disk, words, known } = outcome;
            let boot = if end == End::PowerCut { self.boot + 1 } else { self.boot };
            let world = World { disk, words, boot, sabotage: None, ..self.clone() };
            let vbd = world.open();
            alone(&world.disk, async move |io| {
                for known in known {
                    let found = read(&vbd, &io, known.offset, known.len).await;
                    let same = found.iter().all(|byte| *byte == known.value);
                    assert!(same, "{known:?} is not left by a {end:?}: {:?}", &found[..4]);
                }
                vbd.close(&io).await.expect("closed");
            });
            world.check();
        }
    }

    /// The image at rest contradicts itself nowhere.
    pub fn check(&self) {
        let world = self.clone();
        alone(&self.disk, async move |io| match world.format {
            Format::Qcow2(_) => {
                let report = check(&io, &world.container(), Repair::Nothing).await;
                let report = report.expect("checked");
                assert_eq!(report.corruptions, 0, "{report:?}");
            }
            Format::Vhd { .. } => {
                let report = vhd::check(&io, &world.container(), false).await.expect("checked");
                assert!(report.corruptions.is_empty(), "{:?}", report.corruptions);
            }
            Format::Raw { .. } => {}
        });
    }
}

/// End all threads, whatever they share.
pub fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("ended well");
    }
}

/// Serve one request with `len` bytes of this value; gives what is in memory then.
pub async fn serve(
    vbd: &Vbd,
    io: &Io,
    kind: Kind,
    (offset, len): (u64, u64),
    value: u8,
    fua: bool,
) -> Result<Vec<u8>, Error> {
    let mut buffer = io.buffer(len.max(1) as usize).map_err(Error::Os)?;
    buffer.bytes_mut().fill(value);
    let mem = buffer.mem().window(0, len as usize);
    vbd.serve(io, Request { kind, offset, len, mem, fua }).await?;
    Ok(buffer.bytes()[..len as usize].to_vec())
}

pub async fn write(vbd: &Vbd, io: &Io, offset: u64, len: u64, value: u8) {
    let end = serve(vbd, io, Kind::Write, (offset, len), value, false).await;
    end.expect("written");
}

pub async fn write_durably(vbd: &Vbd, io: &Io, offset: u64, len: u64, value: u8) {
    let end = serve(vbd, io, Kind::Write, (offset, len), value, true).await;
    end.expect("written");
}

pub async fn read(vbd: &Vbd, io: &Io, offset: u64, len: u64) -> Vec<u8> {
    serve(vbd, io, Kind::Read, (offset, len), 0xee, false).await.expect("read")
}

pub async fn discard(vbd: &Vbd, io: &Io, offset: u64, len: u64) {
    serve(vbd, io, Kind::Discard, (offset, len), 0, false).await.expect("discarded");
}

pub async fn flush(vbd: &Vbd, io: &Io) {
    serve(vbd, io, Kind::Flush, (0, 0), 0, false).await.expect("flushed");
}
