//! Power cuts while a VHD is resized or repaired, on the simulated disk: at every turn what a cut would
//! leave has one of the two sizes and all of its content, and a repair makes it whole.
//! `RINGTAP_SEEDS` sets how many seeds each case is tried with; a failure names its seed.

mod common;
#[path = "common/container.rs"]
mod container;

use std::cell::RefCell;
use std::rc::Rc;

use ringtap_image::vhd::{self, CreateOptions, Kind as VhdKind, Parent, Report, Sabotage};
use ringtap_image::{CacheMode, Container, Traits};
use ringtap_io::{File, Io};
use ringtap_sim::{Disk, End, Ends, Lie, Run, SECTOR, all_well, caught, read_all, seeds, stamp};
use ringtap_vbd::{Kind, Request, Vbd};

use common::Served;
use container::blocks;

/// Not a multiple of any block.
const SECTORS: u64 = 90;

/// What is told of an image without a footer.
const NO_FOOTER: &str = "is it a VHD, and whole?";

fn bytes(sectors: u64) -> u64 {
    sectors * SECTOR as u64
}

/// What an image says: every byte of its disk.
type Said = Vec<u8>;

#[derive(Clone)]
struct Bench {
    disk: Disk,
    /// The topmost last.
    chain: Vec<File>,
    align: u64,
    kind: VhdKind,
}

/// What is done to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Resize(u64),
    Repair,
}

impl Deed {
    async fn perform(self, io: &Io, container: &Container) -> Result<(), String> {
        match self {
            Deed::Resize(sectors) => {
                let end = vhd::resize(io, container, bytes(sectors), None).await;
                end.map_err(|error| error.to_string())
            }
            Deed::Repair => {
                let report = vhd::check(io, container, true).await;
                report.map(|_| ()).map_err(|error| error.to_string())
            }
        }
    }
}

impl Bench {
    /// An image with some content.
    fn new(seed: u64, kind: VhdKind) -> Bench {
        let mut rng = fastrand::Rng::with_seed(seed);
        let disk = Disk::any(&mut rng);
        // A fixed disk has to end with a whole block.
        let most = if kind == VhdKind::Fixed { 2 } else { 3 };
        let align = [1, 512, 4096][rng.usize(0..most)];
        let mut bench = Bench { disk, chain: vec![], align, kind };
        if kind == VhdKind::Differencing {
            bench.add(VhdKind::Dynamic, &mut rng);
        }
        bench.add(kind, &mut rng);
        bench
    }

    fn add(&mut self, kind: VhdKind, rng: &mut fastrand::Rng) {
        let file = self.disk.add_file(0, self.align as usize);
        let parent = self.chain.last().copied();
        self.chain.push(file);
        let options = CreateOptions {
            size: bytes(SECTORS),
            kind,
            force_size: true,
            block_size: Some(4096 << rng.u8(0..3)),
            parent: None,
            id: Some([self.chain.len() as u8; 16]),
        };
        let writes: Vec<(u64, u64, u64)> = (0..6)
            .map(|_| {
                let first = rng.u64(0..SECTORS);
                (first, rng.u64(1..=(SECTORS - first).min(20)), rng.u64(1..))
            })
            .collect();
        let bench = self.clone();
        self.alone(async move |io| {
            let parent = match parent {
                Some(parent) => {
                    Some(Parent::read(&io, &bench.container(parent, true)).await.expect("a VHD"))
                }
                None => None,
            };
            let options = CreateOptions { parent, ..options };
            vhd::create(&io, &bench.container(file, false), &options).await.expect("made");
            let vbd = bench.open(&io, false).await.expect("it opens");
            for (first, sectors, value) in writes {
                let mut buffer = io.buffer(bytes(sectors) as usize).expect("memory");
                stamp(buffer.bytes_mut(), first, value);
                let (offset, len) = (bytes(first), bytes(sectors));
                let mem = buffer.mem();
                let request = Request { kind: Kind::Write, offset, len, mem, fua: false };
                vbd.serve(&io, request).await.expect("written");
            }
            vbd.close(&io).await.expect("closed");
        });
    }

    /// Run a task on the disk as it is, with nothing awkward.
    fn alone<T: 'static, F: Future<Output = T> + 'static>(&self, task: impl FnOnce(Io) -> F) -> T {
        Run::new(&self.disk, 1).quiet().task(task)
    }

    fn top(&self) -> File {
        *self.chain.last().expect("an image")
    }

    fn container(&self, file: File, read_only: bool) -> Container {
        let traits = Traits { read_only, ..blocks(self.align) };
        Container::simulated(file, self.disk.size(file), traits)
    }

    async fn open(&self, io: &Io, read_only: bool) -> Result<Vbd, String> {
        let mut image = None;
        for file in &self.chain {
            let container = self.container(*file, read_only || *file != self.top());
            let opened = vhd::open_in(io, container, image.take()).await;
            image = Some(opened.map_err(|error| error.to_string())?);
        }
        Ok(Vbd::new(image.expect("an image"), CacheMode::None))
    }

    /// What a check finds, and what the image says.
    fn look(&self) -> Result<(Report, Said), String> {
        let bench = self.clone();
        self.alone(async move |io| {
            let report = vhd::check(&io, &bench.container(bench.top(), true), false).await;
            let report = report.map_err(|error| error.to_string())?;
            let vbd = bench.open(&io, true).await?;
            let sectors = vbd.size() / SECTOR as u64;
            let found = read_all(&io, &Served::new(vbd), sectors).await;
            Ok((report, found.map_err(|error| error.to_string())?))
        })
    }

    fn perform(&self, deed: Deed) -> Result<(), String> {
        let container = self.container(self.top(), false);
        self.alone(async move |io| deed.perform(&io, &container).await)
    }

    /// What is wrong with what a cut has left, if anything is.
    fn judge(&self, deed: Deed, before: &Said) -> Result<Left, String> {
        let (report, says) = match self.look() {
            Err(error) if self.kind == VhdKind::Fixed && error.contains(NO_FOOTER) => {
                let mut there = vec![0; before.len()];
                self.disk.peek(self.top(), 0, &mut there);
                let kept = match deed {
                    Deed::Resize(sectors) => there.len().min(bytes(sectors) as usize),
                    Deed::Repair => there.len(),
                };
                return match there[..kept] == before[..kept] {
                    true => Ok(Left::Refused),
                    false => Err("refused, and content is lost".to_owned()),
                };
            }
            end => end?,
        };
        if !report.corruptions.is_empty() {
            return Err(format!("{:?}", report.corruptions));
        }
        let left = self.compare(deed, before, &says)?;
        // Whatever is not as it should be is made so, and nothing else.
        self.perform(Deed::Repair)?;
        let (report, again) = self.look()?;
        let sound = report.corruptions.is_empty() && report.footers.is_empty();
        if !sound || report.leaked > 0 || again != says {
            return Err(format!("after a repair: {report:?}"));
        }
        // And then it is done after all.
        self.perform(deed)?;
        let (_, done) = self.look()?;
        self.compare(deed, before, &done)?;
        match deed {
            Deed::Resize(sectors) if done.len() as u64 != bytes(sectors) => {
                Err(format!("resized anew it has {} bytes", done.len()))
            }
            _ => Ok(left),
        }
    }

    /// The old disk or the new one.
    fn compare(&self, deed: Deed, before: &Said, says: &Said) -> Result<Left, String> {
        let Deed::Resize(sectors) = deed else {
            return if says == before { Ok(Left::Old) } else { Err("content is lost".into()) };
        };
        let (old, new) = (before.len(), bytes(sectors) as usize);
        // What is being cut off is lost, whenever that is.
        let kept = says.len().min(if new < old { new } else { usize::MAX });
        let (mut found, mut wanted) = (says[..kept].to_vec(), before.clone());
        wanted.resize(kept, 0);
        if self.kind == VhdKind::Fixed && kept > old {
            // The old footer lies where there are to be zeros.
            found[old..old + SECTOR].fill(0);
        }
        if found != wanted {
            return Err("content is lost".to_owned());
        }
        match says.len() {
            len if len == new => Ok(Left::New),
            len if len == old => Ok(Left::Old),
            len => Err(format!("it has {len} bytes")),
        }
    }
}

/// What a cut left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Old,
    New,
    Refused,
}

/// Do something to an image, and look at what a power cut at any turn leaves.
fn try_cuts(bench: &Bench, deed: Deed, lie: Option<Lie>, seed: u64) -> Result<Vec<Left>, String> {
    let (_, before) = bench.look()?;
    let (ends, left) = (Ends::default(), Rc::<RefCell<Vec<Left>>>::default());
    let (tell, cut) = (left.clone(), bench.clone());
    let look = move |disk, _| {
        let sabotage = vhd::sabotage(None);
        let found = Bench { disk, ..cut.clone() }.judge(deed, &before);
        vhd::sabotage(sabotage);
        found.map(|found| tell.borrow_mut().push(found))
    };
    let mut rng = fastrand::Rng::with_seed(seed);
    let seeds = move |_| [(); 3].map(|()| rng.u64(..));
    let run = Run::new(&bench.disk, seed).lying(lie);
    let container = bench.container(bench.top(), false);
    run.watched(ends.watch(End::PowerCut, seeds, look))
        .task(async move |io| deed.perform(&io, &container).await)?;
    ends.seen()?;
    Ok(left.take())
}

const KINDS: [VhdKind; 3] = [VhdKind::Fixed, VhdKind::Dynamic, VhdKind::Differencing];

/// Within the last block, into new ones, and far beyond the table's sector; a fixed one smaller, too.
fn sizes(kind: VhdKind) -> &'static [u64] {
    match kind {
        VhdKind::Fixed => &[91, 93, 300, 89, 40],
        _ => &[93, 100, 1100],
    }
}

#[test]
fn a_resize_leaves_one_size_or_the_other() {
    for kind in KINDS {
        let mut seen = vec![];
        for sectors in sizes(kind) {
            seen.extend(all_well(seeds(6), (kind, sectors), |seed| {
                let bench = Bench::new(seed, kind);
                let left = try_cuts(&bench, Deed::Resize(*sectors), None, seed)?;
                let (report, says) = bench.look().expect("a whole image");
                assert_eq!((report.footers, report.leaked), (vec![], 0), "seed {seed}, {kind:?}");
                assert_eq!(says.len() as u64, bytes(*sectors));
                Ok::<_, String>(left)
            }));
        }
        let seen = seen.concat();
        for left in [Left::Old, Left::New] {
            let count = seen.iter().filter(|it| **it == left).count();
            assert!(count > 20, "{kind:?}: {left:?} {count} times");
        }
        let refused = seen.iter().filter(|it| **it == Left::Refused).count();
        assert!(refused * 2 < seen.len(), "{kind:?}: refused {refused} of {}", seen.len());
    }
}

/// An image that needs a repair: one of its footers is gone, or bytes lie behind the last block.
fn damaged(seed: u64, kind: VhdKind) -> Bench {
    let bench = Bench::new(seed, kind);
    let (disk, top) = (&bench.disk, bench.top());
    let end = disk.size(top);
    match seed % 4 {
        0 => disk.poke(top, 0, &[0xaa; SECTOR]),
        1 => disk.poke(top, end - SECTOR as u64, &[0; SECTOR]),
        2 => disk.poke(top, end, &[0x77; 9 * SECTOR]),
        _ => {
            // The only good footer is far behind its place.
            let mut footer = [0; SECTOR];
            disk.peek(top, end - SECTOR as u64, &mut footer);
            disk.poke(top, end + 4096, &footer);
            disk.poke(top, end - SECTOR as u64, &[0x77; SECTOR]);
            disk.poke(top, 0, &[0xaa; SECTOR]);
        }
    }
    bench
}

#[test]
fn a_repair_loses_nothing() {
    for kind in [VhdKind::Dynamic, VhdKind::Differencing] {
        for deed in [Deed::Repair, Deed::Resize(300)] {
            all_well(seeds(16), (kind, deed), |seed| {
                let bench = damaged(seed, kind);
                let (report, _) = bench.look().expect("one footer is good");
                assert!(!report.footers.is_empty() || report.leaked > 0, "seed {seed}: {report:?}");
                let left = try_cuts(&bench, deed, None, seed)?;
                let (report, _) = bench.look().expect("a whole image");
                assert_eq!((report.footers, report.leaked), (vec![], 0), "seed {seed}, {kind:?}");
                Ok::<_, String>(left)
            });
        }
    }
}

#[test]
fn sabotage_is_caught() {
    for (sabotage, lie, deed) in [
        (Some(Sabotage::TableLate), None, Deed::Resize(1100)),
        (Some(Sabotage::CopyLate), None, Deed::Repair),
        (None, Some(Lie::SyncDoesNothing), Deed::Resize(1100)),
        (None, Some(Lie::SyncDoesNothing), Deed::Repair),
    ] {
        caught((sabotage, lie, deed), 1, 16, |seed| {
            let bench = match deed {
                Deed::Repair => damaged(3 + 4 * seed, VhdKind::Dynamic),
                Deed::Resize(_) => Bench::new(seed, VhdKind::Dynamic),
            };
            vhd::sabotage(sabotage);
            let end = try_cuts(&bench, deed, lie, seed);
            vhd::sabotage(None);
            end.is_err()
        });
    }
}
