//! A bitmap inside the lowest image, which goes on in each overlay that takes its image's place: whenever the server is killed
//! or the power goes, what it says that may be believed misses nothing.

use ringtap_image::Image;
use ringtap_image::qcow2::{BitmapChange, BitmapSet, There, carry_bitmaps, change_bitmaps};
use ringtap_io::Io;
use ringtap_sim::{Bench, End, Guest, Promise, SECTOR, seeds};

use super::{Below, Chain, SECTORS, timed};

const NAME: &str = "noted";

/// How it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inside {
    Well,
    /// In an overlay that says at first that nothing has changed.
    AllClear,
    /// As it is before the disk stands still.
    Early,
}

impl Chain {
    fn with_bitmap(seed: u64, inside: Inside) -> Chain {
        let chain = Chain { inside: Some(inside), ..Chain::upon(Below::Qcow2, seed, None) };
        let image = timed(&chain.disk, chain.files[0]);
        chain.alone(async move |io| {
            let granularity = Some(SECTOR as u64);
            let add = BitmapChange::Add { name: NAME.into(), granularity };
            change_bitmaps(&io, &image, &[add]).await.expect("a bitmap");
        });
        chain
    }

    /// Have the next overlay hold it; whether there is one.
    pub async fn carry(&self, io: &Io, base: &dyn Image, next: usize) -> Result<bool, String> {
        let all = base.bitmaps().map(|bitmaps| bitmaps.carried()).unwrap_or_default();
        if self.inside.is_none() || all.is_empty() {
            return Ok(false);
        }
        // What a killed server has left of it is taken up.
        let overlay = self.opener(next).open(io, Some(base.fork())).await?;
        overlay.close(io).await.map_err(|error| error.to_string())?;
        drop(overlay);
        let container = timed(&self.disk, self.files[next]);
        let carried = carry_bitmaps(io, &container, &all, There::IsReplaced).await;
        carried.map_err(|error| error.to_string())?;
        if self.inside == Some(Inside::AllClear) {
            let clear = [BitmapChange::Clear(NAME.into())];
            let cleared = change_bitmaps(io, &container, &clear).await;
            cleared.map_err(|error| error.to_string())?;
        }
        Ok(true)
    }

    /// Who begins anew finds the disk in the overlay, which is not used yet.
    pub fn is_written_down(&self, next: usize, base: &dyn Image, overlay: &dyn Image) {
        self.top.set(next);
        if self.inside == Some(Inside::Early) {
            goes_on(base, overlay);
        }
    }
}

pub fn goes_on(base: &dyn Image, overlay: &dyn Image) {
    if let (Some(from), Some(to)) = (base.bitmaps(), overlay.bitmaps()) {
        to.be_as(from);
    }
}

/// Whether every sector that was written is marked, where the bitmap may be believed: not after a power cut.
pub fn misses_nothing(bitmaps: Option<&BitmapSet>, found: &[u8], end: End) -> Result<(), String> {
    let Some(bits) = bitmaps.and_then(|bitmaps| bitmaps.get(NAME)) else {
        let lost = Err("a killed server's bitmap is lost".into());
        return if end == End::Kill { lost } else { Ok(()) };
    };
    for (at, sector) in (0..).step_by(SECTOR).zip(found.chunks(SECTOR)) {
        if sector.iter().any(|byte| *byte != 0) && !bits.run(at, 1).0 {
            return Err(format!("{end:?}: what was written at {at} is not marked"));
        }
    }
    Ok(())
}

/// One server after the other, until it is killed, and one that loses its power in the end.
fn trial(seed: u64, inside: Inside) -> Result<usize, String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut chain = Chain::with_bitmap(seed, inside);
    let mut guest = Guest::new(SECTORS, Promise::Flush);
    for end in [End::Kill, End::Kill, End::Kill, End::PowerCut] {
        chain.run(&guest, &mut rng)?;
        (chain, guest) = chain.ends(end, rng.u64(..), &guest)?;
    }
    Ok(chain.top.get())
}

#[test]
fn a_bitmap_inside_an_image_misses_nothing_as_the_disk_goes_on() {
    let taken: usize =
        ringtap_sim::all_well(seeds(200), (), |seed| trial(seed, Inside::Well)).into_iter().sum();
    println!("{taken} snapshots");
    assert!(taken > 50, "{taken}");
}

#[test]
fn a_bitmap_that_misses_something_is_caught() {
    // What is marked between two turns is seldom all that there is of a sector.
    for (inside, least) in [(Inside::AllClear, 4), (Inside::Early, 1)] {
        let caught: Vec<u64> =
            (0..4_000).filter(|seed| trial(*seed, inside).is_err()).take(least).collect();
        println!("{inside:?}: {caught:?}");
        assert_eq!(caught.len(), least, "{inside:?}: {caught:?} of 4000");
    }
}
