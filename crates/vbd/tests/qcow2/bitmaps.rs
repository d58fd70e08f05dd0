//! Dirty bitmaps under power cuts and killed servers: one that is shown as valid misses no change, one
//! that was stored says no more than was asked for, and a killed server loses none.

use std::sync::Arc;

use ringtap_image::qcow2::{
    BitmapChange, Bits, Sabotage, change_bitmaps, list_bitmaps, load_bitmap,
};
use ringtap_io::Tasks;
use ringtap_sim::{Ask, Bench as _, End, SECTOR, Sim, all_well, caught, random_asks, seeds};

use crate::bench::Bench;

const ASKS: usize = 30;
const NAME: &str = "noted";

impl Bench {
    /// Whether its topmost image can have bitmaps.
    fn has_bitmaps(&self) -> bool {
        let top = self.layers.last().and_then(|layer| layer.options.as_ref());
        top.is_some_and(|options| options.version > 2)
    }

    /// Put a new bitmap in the place of the one there was, all clear; whether there is room for it.
    fn renew_bitmap(&mut self, granularity: u64) -> Result<bool, String> {
        self.baseline = None;
        let found = self.read_all()?;
        *self = self.after(End::PowerCut, 0);
        let Some(layer) = self.layers.last() else { return Ok(false) };
        let container = self.container(layer, false);
        let made = self.alone_by(self.seed, async move |io| {
            let there = list_bitmaps(&io, &container).await?;
            let add = |name: &str| BitmapChange::Add {
                name: name.to_owned(),
                granularity: Some(granularity),
            };
            let remove = there.into_iter().map(|entry| BitmapChange::Remove(entry.name));
            let add = [add("other"), add(NAME), BitmapChange::Disable("other".to_owned())];
            change_bitmaps(&io, &container, &remove.chain(add).collect::<Vec<_>>()).await
        });
        self.baseline = made.is_ok().then(|| found.into());
        Ok(made.is_ok())
    }

    /// The bitmap as the image at rest has it; none where it was not saved.
    pub fn bits_at_rest(&self) -> Result<Option<Bits>, String> {
        let layer = self.layers.last().ok_or("no image")?;
        let container = self.container(layer, true);
        let loaded = self.alone_by(self.seed, async move |io| {
            let there = list_bitmaps(&io, &container).await?;
            let usable = |name: &str| there.iter().any(|e| e.name == name && e.is_usable());
            assert!(usable("other"), "a disabled one stays as it is");
            if !usable(NAME) {
                return Ok(None);
            }
            load_bitmap(&io, &container, NAME).await.map(Some)
        });
        loaded.map_err(|error: ringtap_image::qcow2::ToolError| error.to_string())
    }

    /// The bitmap as a server has it, the one after a killed one too.
    pub fn bits_in_use(&self) -> Result<Arc<Bits>, String> {
        let mut tasks = Tasks::new(Box::new(Sim::new(&self.disk, self.seed)));
        let vbd = self.open(&mut tasks).expect("the power stays")?;
        let bitmaps = vbd.bitmaps();
        let bits = bitmaps.as_ref().and_then(|bitmaps| bitmaps.get(NAME));
        bits.cloned().ok_or_else(|| "a killed server's bitmap is lost".to_owned())
    }

    /// Whether every sector is noted that differs from what it was.
    pub fn check_bits(&self, bits: &Bits, found: &[u8]) -> Result<(), String> {
        let baseline = self.baseline.as_ref().ok_or("no bitmap was made")?;
        let sectors = baseline.chunks(SECTOR).zip(found.chunks(SECTOR));
        for (at, (old, new)) in (0..).step_by(SECTOR).zip(sectors) {
            if old != new && !bits.run(at, 1).0 {
                return Err(format!("the change at {at} is not noted in a valid bitmap"));
            }
        }
        Ok(())
    }
}

/// Every range that was asked to change, as a bitmap of the same kind.
struct Asked(Bits);

impl Asked {
    fn new(bench: &Bench, granularity: u64) -> Asked {
        Asked(Bits::new(bench.size, granularity.trailing_zeros() as u8).expect("few bits"))
    }

    fn add(&self, asks: &[Ask]) {
        for ask in asks {
            if let Ask::Write { range, .. } | Ask::Zero { range, .. } | Ask::Discard(range) = ask {
                let sector = SECTOR as u64;
                self.0.set(range.start * sector, (range.end - range.start) * sector);
            }
        }
    }
}

/// Serve, look at cuts or kills at many turns, let one happen or close; go on.
fn trial(mut bench: Bench) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(bench.seed);
    let granularity = 512 << rng.u32(0..4);
    let mut guest = bench.guest();
    if !bench.has_bitmaps() || !bench.renew_bitmap(granularity)? {
        return Ok(());
    }
    let mut asked = Asked::new(&bench, granularity);
    for _ in 0..4 {
        let (end, close) = (End::any(&mut rng), rng.bool());
        bench.disk.cut_power_at_turn(if close { u64::MAX } else { rng.u64(1..150) });
        let asks = random_asks(&mut rng, bench.sectors(), ASKS);
        asked.add(&asks);
        bench.run(&guest, asks, close, Some((end, 10)))?;
        bench.disk.cut_power_at_turn(u64::MAX);
        if close {
            let bits =
                bench.after(End::Kill, 0).bits_at_rest()?.ok_or("it was closed, and not stored")?;
            // Of requests that an earlier end cut off, not all were begun.
            if bits.runs().any(|(offset, len)| asked.0.run(offset, len) != (true, len)) {
                return Err("more is noted than was asked for".to_owned());
            }
        }
        bench = bench.after(end, rng.u64(..));
        guest = bench.after(end, 0).finds(&guest, end)?;
        if end == End::PowerCut && bench.bits_at_rest()?.is_none() {
            if !bench.renew_bitmap(granularity)? {
                return Ok(());
            }
            asked = Asked::new(&bench, granularity);
        }
    }
    Ok(())
}

#[test]
fn valid_bitmaps_miss_nothing() {
    all_well(seeds(60), (), |seed| trial(Bench::new(seed)));
}

#[test]
fn bitmaps_that_lie_are_caught() {
    for sabotage in
        [Sabotage::BitmapsNotMarked, Sabotage::BitmapsNotNoted, Sabotage::BitmapsForgotten]
    {
        caught(sabotage, 6, 24, |seed| {
            let mut bench = Bench::new(seed);
            bench.sabotage = Some(sabotage);
            trial(bench).is_err()
        });
    }
}
