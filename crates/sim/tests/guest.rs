//! A guest straight on a simulated file: honest disks pass, every way of lying is caught.

use std::rc::Rc;

use ringtap_io::{File, Io, Mem, Op, Tasks};
use ringtap_sim::{
    Ask, Device, Disk, Guest, Lie, Promise, Refuses, SECTOR, Sim, Wrong, is_power_cut, random_asks,
};

const SECTORS: u64 = 64;

/// A file as it is; it does not serialise anything.
struct Plain {
    file: File,
    writethrough: bool,
}

impl Device for Plain {
    type Error = i32;

    async fn serve(&self, io: &Io, ask: &Ask, mem: Mem) -> Result<(), i32> {
        let file = self.file;
        let bytes = |sectors: u64| sectors * SECTOR as u64;
        match ask {
            Ask::Read(range) => {
                assert_eq!(io.read(file, bytes(range.start), mem).await?, mem.len());
                Ok(())
            }
            Ask::Write { range, durable } => {
                let durable = *durable || self.writethrough;
                io.write(file, bytes(range.start), mem, durable).await
            }
            Ask::Zero { range, unmap, durable } => {
                let (offset, len) = (bytes(range.start), bytes(range.end - range.start));
                io.to_the_end(match unmap {
                    true => Op::PunchHole { file, offset, len },
                    false => Op::ZeroRange { file, offset, len },
                })
                .await?;
                if *durable || self.writethrough { io.sync(file).await } else { Ok(()) }
            }
            Ask::Discard(range) => {
                let (offset, len) = (bytes(range.start), bytes(range.end - range.start));
                io.to_the_end(Op::PunchHole { file, offset, len }).await
            }
            Ask::Flush => io.sync(file).await,
        }
    }
}

/// One run; a cut at every turn is looked at, and the last one carried out.
fn trial(seed: u64, promise: Promise, lie: Option<Lie>) -> Result<(), Wrong> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let disk = Disk::new(if seed % 4 == 0 { 4096 } else { 512 });
    let file = disk.add_file(SECTORS * SECTOR as u64, 1);
    let guest = Guest::new(SECTORS, promise);
    let watch = guest.clone();
    let mut sim =
        Sim::new(&disk, seed).at_every_turn(move |cut| watch.check_raw_outcomes(cut, file));
    if let Some(lie) = lie {
        sim = sim.lie(lie);
    }
    disk.cut_power_at_turn(rng.u64(1..60));
    let mut tasks = Tasks::new(Box::new(sim));
    let device = Rc::new(Plain { file, writethrough: promise == Promise::Writethrough });
    guest.spawn(&mut tasks, &device, 4, random_asks(&mut rng, SECTORS, 30));
    if let Err(error) = tasks.run() {
        assert!(is_power_cut(&error), "{error}");
    }
    drop(tasks);
    let failed = guest.failures();
    assert!(failed.is_empty(), "{failed:?}");
    if let Some(wrong) = guest.wrong() {
        return Err(wrong);
    }
    let mut left = vec![0; (SECTORS as usize) * SECTOR];
    disk.after_power_cut(seed).peek(file, 0, &mut left);
    guest.after_power_cut(&left).map(drop)
}

#[test]
fn an_honest_disk_keeps_its_promises() {
    for promise in [Promise::Flush, Promise::Writethrough, Promise::Nothing] {
        for seed in 0..200 {
            if let Err(wrong) = trial(seed, promise, None) {
                panic!("{promise:?}, seed {seed}: {wrong}");
            }
        }
    }
}

#[test]
fn every_lie_is_caught() {
    for (lie, promise) in [
        (Lie::SyncDoesNothing, Promise::Flush),
        (Lie::SyncDoesNothing, Promise::Writethrough),
        (Lie::DurableIsNot, Promise::Flush),
        (Lie::DurableIsNot, Promise::Writethrough),
        (Lie::EarlyWrites, Promise::Flush),
        (Lie::EarlyWrites, Promise::Nothing),
        (Lie::ZeroDoesNothing, Promise::Nothing),
    ] {
        let caught = (0..100).filter(|seed| trial(*seed, promise, Some(lie)).is_err()).count();
        println!("{lie:?} under {promise:?}: {caught} of 100");
        assert!(caught > 10, "{lie:?} under {promise:?} was noticed in {caught} of 100 seeds");
    }
}

#[test]
fn without_promises_only_lies_about_the_present_matter() {
    for seed in 0..100 {
        for lie in [Lie::SyncDoesNothing, Lie::DurableIsNot] {
            trial(seed, Promise::Nothing, Some(lie)).expect("nothing was promised");
        }
    }
}

#[test]
fn a_seed_gives_the_same_run() {
    let story =
        |seed| trial(seed, Promise::Flush, Some(Lie::SyncDoesNothing)).map_err(|w| w.to_string());
    for seed in 0..30 {
        assert_eq!(story(seed), story(seed));
    }
    assert_ne!(story(1), story(2));
}

#[test]
fn failures_are_told_and_the_rest_stays_true() {
    let mut failures = 0;
    for seed in 0..100 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let disk = Disk::new(512);
        let file = disk.add_file(SECTORS * SECTOR as u64, 1);
        disk.break_range(file, 8192..9216, Refuses::All);
        let guest = Guest::new(SECTORS, Promise::Flush);
        let watch = guest.clone();
        let sim =
            Sim::new(&disk, seed).at_every_turn(move |cut| watch.check_raw_outcomes(cut, file));
        let mut tasks = Tasks::new(Box::new(sim));
        let device = Rc::new(Plain { file, writethrough: false });
        guest.spawn(&mut tasks, &device, 4, random_asks(&mut rng, SECTORS, 40));
        tasks.run().expect("runs");
        assert!(guest.wrong().is_none(), "seed {seed}: {}", guest.wrong().expect("wrong"));
        failures += guest.failures().len();
    }
    assert!(failures > 100, "{failures}");
}
