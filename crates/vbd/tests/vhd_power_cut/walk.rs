//! VHDs in the walk of images that are copied, put back, rolled back, swapped and written to by others
//! ([`ringtap_sim::walk`]).

use ringtap_io::File;
use ringtap_sim::{Ask, Disk, Guest, Logged, Look, Run, Seen, all_well, caught, seeds, walk};

use crate::bench::{Bench, CASES, Case, SECTORS, blank, run, serve};

impl Logged for Bench {
    fn file(&self) -> File {
        *self.chain.last().expect("a chain has an image")
    }

    fn sectors(&self) -> u64 {
        SECTORS
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
        let vbd = self.vbd(false);
        if let Some(turns) = turns {
            self.disk.cut_power_at_turn(self.disk.turns() + turns);
        }
        serve(Run::new(&self.disk, self.seed).watched(look), &vbd, guest, asks)
    }

    fn close(&self) {
        Bench::close(self);
    }

    fn found(&self, read_only: bool) -> Result<Vec<u8>, String> {
        let bench = self.clone();
        run(&self.disk, move |io| async move { bench.read(&io, read_only, true).await })
    }

    fn holds(&self) -> Result<Vec<u8>, String> {
        self.read_whole()
    }

    fn make_stable(&self) {
        let container = self.container(self.file(), false);
        let synced = run(&self.disk, move |io| async move { container.sync(&io).await });
        synced.expect("synced");
    }

    fn before_others(&self) -> Bench {
        Bench { words: blank(), ..self.clone() }
    }

    fn drop_log(&mut self) {
        self.words = blank();
    }
}

/// Two images of a kind, over the same ones.
fn twins(seed: u64, case: Case, blind: bool) -> [Bench; 2] {
    let (bench, _) = Bench::new(seed, case);
    let bench = Bench { blind, ..bench };
    let (disk, file): (&Disk, _) = (&bench.disk, bench.file());
    let saved = disk.save(file, 0).expect("a file");
    let other = match case {
        Case::DynamicOnDevice => disk.add_device(disk.size(file), bench.align),
        _ => disk.add_file(0, bench.align),
    };
    disk.restore(other, &saved, false);
    let mut second = bench.before_others();
    second.chain.pop();
    second.chain.push(other);
    [bench, second]
}

#[test]
fn a_log_is_of_no_other_state_of_its_image() {
    for case in CASES {
        let mut all = Seen::default();
        for seen in all_well(seeds(60), case, |seed| walk(twins(seed, case, false), seed)) {
            all += seen;
        }
        println!("{case:?}: {all:?}");
        if case != Case::Fixed {
            assert!(all.taken_up > 0 && all.passed_by > 0, "{case:?}: {all:?}");
            assert!(all.refused + all.either <= 1 + all.passed_by / 8, "{case:?}: {all:?}");
        }
    }
}

#[test]
fn believing_any_log_is_noticed() {
    for case in CASES.into_iter().filter(|case| *case != Case::Fixed) {
        // That the log contradicts the image is often seen, too: then it is refused where it should be passed by.
        let walked = |seed| walk(twins(seed, case, true), seed);
        caught(case, 6, 20, |seed| match std::panic::catch_unwind(|| walked(seed)) {
            Ok(Ok(seen)) => seen.refused > 0,
            Ok(Err(_)) | Err(_) => true,
        });
    }
}
