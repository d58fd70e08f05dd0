//! qcow2 images in the walk of images that are copied, put back, rolled back, swapped and written to by others
//! ([`ringtap_sim::walk`]).

use ringtap_image::RestartChoice;
use ringtap_io::{File, Tasks};
use ringtap_sim::{
    Ask, Guest, Logged, Look, Seen, Sim, all_well, caught, random_asks, seeds, walk,
};

use crate::bench::Bench;

impl Logged for Bench {
    fn file(&self) -> File {
        self.top()
    }

    fn sectors(&self) -> u64 {
        Bench::sectors(self)
    }

    fn set_seed(&mut self, seed: u64) {
        self.seed = seed;
    }

    fn serve(
        &self,
        guest: &Guest,
        asks: Vec<Ask>,
        turns: Option<u64>,
        look: Look,
    ) -> Result<(), String> {
        if let Some(turns) = turns {
            // Often so early that it is killed while it takes the image up.
            self.disk.cut_power_at_turn(self.disk.turns() + turns);
        }
        self.run_looking(guest, asks, look)
    }

    fn close(&self) {
        let mut tasks = Tasks::new(Box::new(Sim::new(&self.disk, self.seed)));
        let vbd = self.open(&mut tasks).expect("the power stays").expect("the image opens");
        let io = tasks.io().clone();
        let closed = tasks.block_on(async move { vbd.close(&io).await });
        closed.expect("the simulation runs").expect("closed");
    }

    fn found(&self, read_only: bool) -> Result<Vec<u8>, String> {
        Bench { read_only, ..self.clone() }.read_all()
    }

    fn holds(&self) -> Result<Vec<u8>, String> {
        self.check()?;
        Bench { read_only: true, ..self.before_others() }.read_all()
    }

    fn make_stable(&self) {
        let container = self.container(self.layers.last().expect("an image"), false);
        let synced = self.alone_by(1, async move |io| container.sync(&io).await);
        synced.expect("synced");
    }

    fn before_others(&self) -> Bench {
        Bench { foreign: true, ..self.clone() }
    }

    fn drop_log(&mut self) {
        Logged::close(&Bench { choice: Some(RestartChoice::Drop), ..self.clone() });
    }
}

/// Two images of a version, upon nothing or upon the same raw one.
fn twins(seed: u64, version: u32, blind: bool) -> [Bench; 2] {
    let mut rng = fastrand::Rng::with_seed(!seed);
    let mut bench = Bench { blind, ..Bench::empty(seed, &mut rng) };
    if rng.bool() {
        bench.add_raw(&mut rng);
        let (guest, asks) = (bench.guest(), random_asks(&mut rng, Logged::sectors(&bench), 12));
        bench.run(&guest, asks, true, None).expect("served");
    }
    let extended_l2 = version == 3 && rng.bool();
    bench.add_layer_of(&mut rng, version, extended_l2, false);
    Logged::make_stable(&bench);
    let (disk, file) = (bench.disk.clone(), bench.top());
    let saved = disk.save(file, 0).expect("a file");
    let mut second = Bench { inode: bench.inode + 1, choice: None, ..bench.without_log() };
    let like = second.layers.last_mut().expect("an image");
    like.file = match like.traits.regular {
        true => disk.add_file(0, like.traits.request_alignment as usize),
        false => disk.add_device(disk.size(file), like.traits.request_alignment as usize),
    };
    disk.restore(like.file, &saved, false);
    [bench, second]
}

fn all_walk(version: u32) -> Seen {
    let mut all = Seen::default();
    for seen in all_well(seeds(100), version, |seed| walk(twins(seed, version, false), seed)) {
        all += seen;
    }
    println!("version {version}: {all:?}");
    all
}

#[test]
fn a_log_of_version_3_is_of_no_other_state_of_its_image() {
    let all = all_walk(3);
    assert!(all.taken_up > 0 && all.passed_by > 0, "{all:?}");
    assert!(all.refused + all.either <= 1 + all.passed_by / 8, "{all:?}");
}

#[test]
fn a_log_of_version_2_is_of_no_other_state_of_its_image() {
    let all = all_walk(2);
    assert!(all.taken_up > 0 && all.passed_by > 0, "{all:?}");
    assert!(all.refused + all.either <= 1 + all.passed_by / 8, "{all:?}");
}

#[test]
fn believing_any_log_is_noticed() {
    // Version 3 has more to go by than times.
    for (version, least, of) in [(2, 6, 20), (3, 2, 40)] {
        // That the log contradicts the image is often seen, too: then it is refused where it should be passed by.
        let walked = |seed| walk(twins(seed, version, true), seed);
        caught(version, least, of, |seed| match std::panic::catch_unwind(|| walked(seed)) {
            Ok(Ok(seen)) => seen.refused > 0,
            Ok(Err(_)) | Err(_) => true,
        });
    }
}
