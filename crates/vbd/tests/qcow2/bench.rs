//! A simulated disk with a chain of images on it, the topmost of them qcow2, and a guest's view of it.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ringtap_image::qcow2::{
    CreateOptions, Header, Parts, Qcow2, Repair, Sabotage, check, create, create_snapshot,
};
use ringtap_image::{
    CacheMode, Container, Identity, Image, Raw, RestartChoice, RestartLog, Traits,
};
use ringtap_io::{File, Io, Tasks};
use ringtap_sim::{
    Ask, Disk, End, Ends, Guest, Lacks, Lie, Promise, Run, SECTOR, Sim, alone, hear_of_cut,
    is_power_cut, random_asks, read_all, turn_all,
};
use ringtap_vbd::sabotage::{Trap, Trapped};
use ringtap_vbd::{Error, Vbd};

use crate::common::Served;
use crate::container::blocks;
use crate::packs::{self, Packs};
use crate::slow::Slow;

/// Requests that a guest has in flight at once.
pub const SLOTS: usize = 6;

/// One image of the chain.
#[derive(Clone, Debug)]
pub struct Layer {
    pub file: File,
    pub data: Option<File>,
    pub traits: Traits,
    /// None for a raw image.
    pub options: Option<CreateOptions>,
}

/// A disk with a chain of images on it.
#[derive(Clone)]
pub struct Bench {
    pub seed: u64,
    pub disk: Disk,
    /// The backing file of all first.
    pub layers: Vec<Layer>,
    pub size: u64,
    pub align: u64,
    pub sabotage: Option<Sabotage>,
    pub lie: Option<Lie>,
    /// Set in the topmost image.
    pub trap: Option<Trap>,
    /// Whole clusters are written compressed.
    pub packs: bool,
    pub table_memory: u64,
    /// The restart log's memory.
    pub words: Arc<[AtomicU64]>,
    /// That beside it.
    pub beside: Arc<[AtomicU64]>,
    /// Which boot of the machine it is.
    pub boot: u128,
    /// The inode number of the topmost image.
    pub inode: u64,
    /// It is opened to be read only.
    pub read_only: bool,
    /// The log is taken for the image's own, whenever that was last written to.
    pub blind: bool,
    /// Whoever serves it knows of no log, as QEMU.
    pub foreign: bool,
    /// What the operator wants done with a log that is in doubt.
    pub choice: Option<RestartChoice>,
    /// What the disk held when its bitmap was made, where it has one.
    pub baseline: Option<Rc<[u8]>>,
}

impl Bench {
    /// As [`Bench::new`], with an image on top that can hold what is compressed.
    pub fn packing(seed: u64) -> Bench {
        let mut bench = Bench::new(seed);
        let mut rng = fastrand::Rng::with_seed(seed);
        while bench.layers.last().is_none_or(|top| top.options.is_none() || top.data.is_some()) {
            bench.add_layer(&mut rng);
        }
        bench.packs = true;
        bench
    }

    /// Everything that may be one way or the other is chosen by the seed.
    pub fn new(seed: u64) -> Bench {
        let mut rng = fastrand::Rng::with_seed(!seed);
        let mut bench = Bench::empty(seed, &mut rng);
        match rng.u8(0..4) {
            0 => bench.add_raw(&mut rng),
            _ => bench.add_layer(&mut rng),
        }
        bench
    }

    /// Without an image.
    pub fn empty(seed: u64, rng: &mut fastrand::Rng) -> Bench {
        let disk = Disk::any(rng);
        let align = [1, 512, 4096][rng.usize(0..3)];
        let sectors = rng.u64(90..=200);
        let (layers, table_memory) = (Vec::new(), [1 << 20, 0][rng.usize(0..2)]);
        let size = sectors * SECTOR as u64;
        let (sabotage, lie) = (None, None);
        let words = blank(rng);
        let (beside, baseline) = (zeros(BESIDE), None);
        Bench {
            seed,
            disk,
            layers,
            size,
            align,
            sabotage,
            lie,
            trap: None,
            packs: false,
            table_memory,
            words,
            beside,
            boot: 1,
            inode: 3,
            read_only: false,
            blind: false,
            foreign: false,
            choice: None,
            baseline,
        }
    }

    /// Put a raw image below all.
    pub fn add_raw(&mut self, rng: &mut fastrand::Rng) {
        let (file, traits) = self.add_file(rng, self.size, false);
        self.layers.push(Layer { file, data: None, traits, options: None });
    }

    fn add_file(&self, rng: &mut fastrand::Rng, size: u64, device: bool) -> (File, Traits) {
        let file = match device {
            true => self.disk.add_device(size, self.align as usize),
            false => self.disk.add_file(size, self.align as usize),
        };
        self.disk.set_lacks(file, Lacks::any(rng, 3));
        let logical_block_size = self.align.max(SECTOR as u64) as u32;
        let traits = Traits { regular: !device, logical_block_size, ..blocks(self.align) };
        (file, traits)
    }

    /// Put a new, empty image upon those there are.
    pub fn add_layer(&mut self, rng: &mut fastrand::Rng) {
        let extended_l2 = rng.bool();
        let version = if !extended_l2 && rng.u8(0..4) == 0 { 2 } else { 3 };
        let external = version == 3 && rng.u8(0..8) == 0;
        self.add_layer_of(rng, version, extended_l2, external);
    }

    /// The same, of that kind.
    pub fn add_layer_of(
        &mut self,
        rng: &mut fastrand::Rng,
        version: u32,
        extended_l2: bool,
        external: bool,
    ) {
        let sizes: &[u64] = match (extended_l2, self.align) {
            (true, _) => &[16384, 32768],
            (false, 4096) => &[4096, 8192],
            (false, _) => &[512, 1024, 4096, 8192],
        };
        let device = !external && rng.u8(0..6) == 0;
        let options = CreateOptions {
            size: self.size,
            version,
            cluster_size: sizes[rng.usize(0..sizes.len())],
            refcount_bits: if version == 2 { 16 } else { 1 << rng.u32(0..7) },
            extended_l2,
            backing_file: (!self.layers.is_empty()).then(|| "below".to_owned()),
            data_file: external.then(|| "data".to_owned()),
            data_file_raw: external && self.layers.is_empty() && rng.bool(),
            ..CreateOptions::default()
        };
        let size = if device { 8 * self.size + (64 << 10) } else { 0 };
        let (file, traits) = self.add_file(rng, size & !4095, device);
        let data = external.then(|| self.add_file(rng, 0, false).0);
        let layer = Layer { file, data, traits, options: Some(options.clone()) };
        let container = self.container(&layer, false);
        let outer = data.map(|data| self.contain(data, traits, false));
        let seed = rng.u64(..);
        self.alone_by(seed, async move |io| {
            create(&io, &container, outer.as_ref(), &options).await.expect("an image");
        });
        self.layers.push(layer);
    }

    /// Take an internal snapshot of the topmost image, where it has room for one: every cluster is
    /// shared then.
    pub fn take_snapshot(&self, rng: &mut fastrand::Rng) {
        let Some(layer) = self.layers.last().filter(|layer| layer.options.is_some()) else {
            return;
        };
        let container = self.container(layer, false);
        let name = format!("{}", rng.u64(..));
        // Narrow refcounts and external data files refuse; the image is as it was then.
        let _may_refuse: Result<(), String> = self.alone_by(rng.u64(..), async move |io| {
            let taken = create_snapshot(&io, &container, &name, (0, 0)).await;
            taken.map(|_| ()).map_err(|error| error.to_string())
        });
    }

    /// Run one task on the disk as it is, with nothing failing.
    pub fn alone_by<T: 'static>(&self, seed: u64, task: impl AsyncFnOnce(Io) -> T + 'static) -> T {
        alone(&self.disk, seed, task)
    }

    fn contain(&self, file: File, traits: Traits, read_only: bool) -> Container {
        let disk = self.disk.clone();
        Container::simulated(file, disk.size(file), Traits { read_only, ..traits })
            .with_time(move || disk.modified(file))
    }

    pub fn container(&self, layer: &Layer, read_only: bool) -> Container {
        self.contain(layer.file, layer.traits, read_only)
    }

    /// The chain's images, in order: containers and what they are.
    fn parts(&self) -> Vec<(Container, Option<Container>, bool)> {
        let top = self.layers.len() - 1;
        let parts = self.layers.iter().enumerate().map(|(index, layer)| {
            let read_only = self.read_only || index < top;
            let data = layer.data.map(|data| {
                let traits = Traits { regular: true, ..layer.traits };
                self.contain(data, traits, read_only)
            });
            (self.container(layer, read_only), data, layer.options.is_none())
        });
        parts.collect()
    }

    /// The chain opened anew, as after a reboot. An error of the outer kind is the power's end.
    pub fn open(&self, tasks: &mut Tasks) -> io::Result<Result<Vbd, String>> {
        let (parts, table_memory, sabotage) = (self.parts(), self.table_memory, self.sabotage);
        let trap = self.trap.clone();
        let (boot, inode, blind) = (self.boot, self.inode, self.blind);
        let (foreign, restart_choice) = (self.foreign, self.choice);
        let io = tasks.io().clone();
        let (top, words, beside) = (parts.len() - 1, self.words.clone(), self.beside.clone());
        if let Some((container, ..)) = parts.last() {
            self.disk.watch(container.file(), container.witness().clone());
        }
        tasks.block_on(async move {
            let mut base: Option<Box<dyn Image>> = None;
            for (index, (container, data, raw)) in parts.into_iter().enumerate() {
                base = Some(match raw {
                    true => Box::new(Raw::new(container)),
                    false => {
                        let header =
                            Header::read(&io, &container).await.map_err(|e| e.to_string())?;
                        let table_memory = Some(table_memory);
                        let identity = Identity { boot, file: (2, inode) };
                        let restart = (index == top && !foreign).then(|| {
                            let log = restart_log(words.clone(), beside.clone(), identity);
                            if blind { log } else { log.of(&container) }
                        });
                        let parts = Parts {
                            data,
                            base,
                            table_memory,
                            restart,
                            restart_choice,
                            sabotage,
                            ..Parts::default()
                        };
                        let image = Qcow2::open(&io, container, header, parts).await;
                        Box::new(image.map_err(|e| e.to_string())?)
                    }
                });
            }
            let image = base.ok_or("no image")?;
            let image = match trap {
                Some(trap) => Trapped::boxed(image, trap),
                None => image,
            };
            Ok(Vbd::new(image, CacheMode::None))
        })
    }

    /// The topmost image's file.
    pub fn top(&self) -> File {
        self.layers.last().expect("a chain has an image").file
    }

    /// The same, served by somebody who finds no log.
    pub fn without_log(&self) -> Bench {
        let (words, beside) = (zeros(self.words.len()), zeros(self.beside.len()));
        Bench { words, beside, choice: Some(RestartChoice::Drop), ..self.clone() }
    }

    /// This log, and the disk of another.
    pub fn with_disk_of(&self, other: &Bench) -> Bench {
        Bench { disk: other.disk.clone(), ..self.clone() }
    }

    pub fn sectors(&self) -> u64 {
        self.size / SECTOR as u64
    }

    /// Sectors of the clusters that are written compressed.
    fn packed(&self) -> Option<u64> {
        let options = self.layers.last().filter(|_| self.packs)?.options.as_ref()?;
        Some(options.cluster_size / SECTOR as u64)
    }

    /// So many requests at random.
    pub fn asks(&self, rng: &mut fastrand::Rng, count: usize) -> Vec<Ask> {
        let mut asks = random_asks(rng, self.sectors(), count);
        if let Some(cluster) = self.packed() {
            packs::whole_clusters(rng, &mut asks, cluster, self.sectors());
        }
        asks
    }

    pub fn guest(&self) -> Guest {
        Guest::new(self.sectors(), Promise::Flush)
    }

    fn orders(&self) -> Run {
        Run::new(&self.disk, self.seed).lying(self.lie)
    }

    /// Let the guest ask, on one queue or two, until it has no more to ask or the power goes; then
    /// close the image, or leave it as a killed server does. What such an end would leave is looked
    /// at in one turn of so many of `watch`; an error is what was wrong first.
    pub fn run(
        &self,
        guest: &Guest,
        asks: Vec<Ask>,
        close: bool,
        watch: Option<(End, u64)>,
    ) -> Result<(), String> {
        let (run, ends) = (self.orders(), Ends::default());
        let run = match watch {
            Some((end, every)) => {
                let mut rng = fastrand::Rng::with_seed(self.seed);
                let seeds = move |_| (rng.u64(0..every) == 0).then(|| rng.u64(..));
                // After a power cut it is no longer this one who opens it.
                let sabotage = self.sabotage.filter(|_| end == End::Kill);
                let bench = Bench { sabotage, trap: None, ..self.clone() };
                run.watched(ends.watch_bench(&bench, guest, end, seeds))
            }
            None => run,
        };
        let end = self.run_by(run, guest, asks, close);
        end.and(ends.seen().map(drop))
    }

    /// As [`Bench::run`], left as a killed server does, with somebody who looks at the disk at every turn.
    pub fn run_looking(
        &self,
        guest: &Guest,
        asks: Vec<Ask>,
        look: impl FnMut(&Disk) + 'static,
    ) -> Result<(), String> {
        self.run_by(self.orders().watched(look), guest, asks, false)
    }

    fn run_by(&self, run: Run, guest: &Guest, asks: Vec<Ask>, close: bool) -> Result<(), String> {
        let mut all = run.queues(|sim| match self.seed % 3 {
            0 => Box::new(Slow::new(sim, self.seed)),
            _ => Box::new(sim),
        });
        let vbd = match self.open(&mut all[0]) {
            Ok(vbd) => vbd.expect("the image opens"),
            Err(error) => {
                assert!(is_power_cut(&error), "{error}");
                return Ok(());
            }
        };
        let slots = SLOTS / all.len();
        guest.spawn_on(&mut all, || Packs::new(vbd.fork(), self.packed()), slots, asks);
        turn_all(&self.disk, &mut all);
        if close && !self.disk.is_cut() {
            let io = all[0].io().clone();
            all[0].spawn(async move {
                let _may_fail: Result<(), Error> = vbd.close(&io).await;
            });
            turn_all(&self.disk, &mut all);
        }
        hear_of_cut(&self.disk, &mut all);
        guest.wrong().map_or(Ok(()), |wrong| Err(wrong.to_string()))
    }

    /// Open the image for several runs; nothing where the disk's failing keeps it from being opened.
    pub fn session(&self) -> Option<(Tasks, Rc<Served>)> {
        let mut tasks = Tasks::new(Box::new(self.orders().reactor(0)));
        let vbd = self.open(&mut tasks).expect("the power stays").ok()?;
        Some((tasks, Rc::new(Served::new(vbd))))
    }

    /// Through the page cache a failed flush cannot be made good: those after it fail too.
    pub fn flushes_stay_failed(&self) -> bool {
        self.align == 1
    }

    /// The whole disk, read through the chain.
    pub fn read_all(&self) -> Result<Vec<u8>, String> {
        let mut tasks = Tasks::new(Box::new(Sim::new(&self.disk, self.seed)));
        let served = Served::new(self.open(&mut tasks).expect("the power stays")?);
        let (io, sectors) = (tasks.io().clone(), self.sectors());
        let all = async move { read_all(&io, &served, sectors).await };
        let found = tasks.block_on(all).expect("the simulation runs");
        found.map_err(|error| error.to_string())
    }

    /// The same disk, served by whoever finds another log.
    pub fn with_log_of(&self, other: &Bench) -> Bench {
        Bench { words: other.words.clone(), choice: None, ..self.clone() }
    }

    /// See that the topmost image is without contradictions; gives how many clusters leak.
    pub fn check(&self) -> Result<u64, String> {
        let Some(layer) = self.layers.last().filter(|layer| layer.options.is_some()) else {
            return Ok(0);
        };
        let container = self.container(layer, true);
        let seed = self.seed;
        let report =
            self.alone_by(seed, async move |io| check(&io, &container, Repair::Nothing).await);
        let report = report.map_err(|error| error.to_string())?;
        if report.corruptions > 0 { Err(format!("check: {report:?}")) } else { Ok(report.leaks) }
    }

    /// Whether QEMU finds the topmost image without contradictions.
    pub fn check_with_qemu(&self) -> Result<(), String> {
        let Some(layer) = self.layers.last().filter(|layer| layer.options.is_some()) else {
            return Ok(());
        };
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let dump = |file: File, name: &str| {
            let mut bytes = vec![0; self.disk.size(file) as usize];
            self.disk.peek(file, 0, &mut bytes);
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).expect("a file");
            format!(r#"{{"driver":"file","filename":"{}"}}"#, path.display())
        };
        let image = dump(layer.file, "image");
        let data = layer.data.map(|data| format!(r#","data-file":{}"#, dump(data, "data")));
        let backing = match layer.options.as_ref().and_then(|options| options.backing_file.as_ref())
        {
            Some(_) => r#","backing":null"#,
            None => "",
        };
        let data = data.unwrap_or_default();
        let image = format!(r#"json:{{"driver":"qcow2","file":{image}{data}{backing}}}"#);
        let check = std::process::Command::new("timeout")
            .args(["20", "qemu-img", "check", &image])
            .output()
            .map_err(|error| error.to_string())?;
        // 3: leaks and nothing else.
        if matches!(check.status.code(), Some(0 | 3)) {
            return Ok(());
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Err(format!("qemu-img check: {}{}", text(&check.stdout), text(&check.stderr)))
    }
}

impl ringtap_sim::Bench for Bench {
    fn disk(&self) -> &Disk {
        &self.disk
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    fn on(&self, disk: Disk, end: End) -> Bench {
        let (words, beside) = (end.leaves(&self.words), end.leaves(&self.beside));
        let boot = self.boot + u128::from(end == End::PowerCut);
        Bench { disk, words, beside, boot, ..self.clone() }
    }

    /// It opens and has no contradictions: as it lies there, after a kill as it is served anew.
    fn look(&self, after: End) -> Result<Vec<u8>, String> {
        if after == End::Kill {
            let found = self.read_all()?;
            self.check()?;
            if self.baseline.is_some() {
                self.check_bits(&*self.bits_in_use()?, &found)?;
            }
            return Ok(found);
        }
        self.check()?;
        if std::env::var_os("RINGTAP_QEMU_CHECK").is_some() {
            self.check_with_qemu()?;
        }
        let bits = if self.baseline.is_some() { self.bits_at_rest()? } else { None };
        let found = self.read_all()?;
        if let Some(bits) = bits {
            self.check_bits(&bits, &found)?;
        }
        Ok(found)
    }
}

/// Memory for a log that has to be flushed often, or hardly ever.
fn blank(rng: &mut fastrand::Rng) -> Arc<[AtomicU64]> {
    let records = [100, 4000][rng.usize(0..2)];
    zeros(RestartLog::words_for(records))
}

/// Words of memory for bits of bitmaps.
const BESIDE: usize = 1000;

fn zeros(count: usize) -> Arc<[AtomicU64]> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

fn restart_log(
    words: Arc<[AtomicU64]>,
    beside: Arc<[AtomicU64]>,
    identity: Identity,
) -> RestartLog {
    RestartLog::with(Arc::new(words), identity, u64::MAX).with_memory(beside)
}
