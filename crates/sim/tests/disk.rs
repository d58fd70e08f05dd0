//! The simulated disk does what a disk does, and forgets what a disk forgets.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use ringtap_io::{File, Io, Op, Tasks};
use ringtap_sim::{Chances, Disk, Fault, Lacks, Refuses, Sim, is_power_cut, is_stuck};

/// Run one task on a well-behaved reactor of this seed.
fn run<T: 'static, F: Future<Output = T> + 'static>(
    disk: &Disk,
    seed: u64,
    task: impl FnOnce(Io) -> F,
) -> T {
    let mut tasks = Tasks::new(Box::new(Sim::new(disk, seed).chances(Chances::NEVER)));
    let io = tasks.io().clone();
    tasks.block_on(task(io)).expect("the simulation runs")
}

async fn fill(io: &Io, file: File, offset: u64, len: usize, byte: u8, durable: bool) -> i32 {
    let mut buffer = io.buffer(len).expect("memory");
    buffer.bytes_mut().fill(byte);
    io.run(Op::Write { file, offset, mem: buffer.mem(), durable }).await
}

fn byte(disk: &Disk, file: File, offset: u64) -> u8 {
    let mut byte = [0];
    disk.peek(file, offset, &mut byte);
    byte[0]
}

/// The first bytes of the file's first `sectors` sectors, over many outcomes of a cut.
fn outcomes(disk: &Disk, file: File, sectors: u64) -> BTreeSet<Vec<u8>> {
    let left = (0..200).map(|seed| disk.after_power_cut(seed));
    left.map(|left| (0..sectors).map(|sector| byte(&left, file, sector * 512)).collect()).collect()
}

fn set(of: &[&[u8]]) -> BTreeSet<Vec<u8>> {
    of.iter().map(|bytes| bytes.to_vec()).collect()
}

#[test]
fn an_unsynced_write_is_lost_kept_or_torn_and_a_synced_one_stays() {
    for seed in 0..20 {
        let disk = Disk::new(512);
        let file = disk.add_file(1024, 1);
        run(&disk, seed, move |io| async move {
            assert_eq!(fill(&io, file, 0, 1024, 1, false).await, 1024);
        });
        assert_eq!(byte(&disk, file, 512), 1);
        assert_eq!(outcomes(&disk, file, 2), set(&[&[0, 0], &[0, 1], &[1, 0], &[1, 1]]));
        run(&disk, seed, move |io| async move {
            io.sync(file).await.expect("sync");
            fill(&io, file, 512, 512, 2, false).await;
            fill(&io, file, 512, 512, 3, false).await;
        });
        assert_eq!(outcomes(&disk, file, 2), set(&[&[1, 1], &[1, 2], &[1, 3]]));
    }
}

#[test]
fn larger_sectors_do_not_tear() {
    let disk = Disk::new(4096);
    let file = disk.add_file(8192, 512);
    run(&disk, 1, move |io| async move {
        fill(&io, file, 0, 1024, 1, false).await;
    });
    assert_eq!(outcomes(&disk, file, 3), set(&[&[0, 0, 0], &[1, 1, 0]]));
}

#[test]
fn a_durable_write_is_stable_alone() {
    let disk = Disk::new(512);
    let file = disk.add_file(1024, 1);
    run(&disk, 3, move |io| async move {
        fill(&io, file, 0, 512, 1, false).await;
        fill(&io, file, 512, 512, 1, true).await;
    });
    assert_eq!(outcomes(&disk, file, 2), set(&[&[0, 1], &[1, 1]]));
}

#[test]
fn a_sync_promises_nothing_for_what_completes_beside_it() {
    let (mut lost, mut kept_only) = (0, 0);
    for seed in 0..60 {
        let disk = Disk::new(512);
        let file = disk.add_file(512, 1);
        let mut tasks = Tasks::new(Box::new(Sim::new(&disk, seed).chances(Chances::NEVER)));
        let io = tasks.io().clone();
        tasks.spawn({
            let io = io.clone();
            async move {
                fill(&io, file, 0, 512, 1, false).await;
            }
        });
        tasks.spawn(async move { io.sync(file).await.expect("sync") });
        tasks.run().expect("runs");
        let outcomes = outcomes(&disk, file, 1);
        lost += u32::from(outcomes.contains(&vec![0]));
        kept_only += u32::from(!outcomes.contains(&vec![0]));
    }
    assert_eq!((lost, kept_only), (60, 0));
}

#[test]
fn a_write_under_way_may_survive_in_part() {
    let mut seen = BTreeSet::new();
    for seed in 0..60 {
        let disk = Disk::new(512);
        let file = disk.add_file(1024, 1);
        disk.cut_power_at_turn(1);
        let mut tasks = Tasks::new(Box::new(Sim::new(&disk, seed)));
        let io = tasks.io().clone();
        let ended = Rc::new(Cell::new(false));
        let end = ended.clone();
        tasks.spawn(async move {
            fill(&io, file, 0, 1024, 1, false).await;
            end.set(true);
        });
        assert!(is_power_cut(&tasks.run().expect_err("the cut")));
        assert!(disk.is_cut());
        drop(tasks);
        assert!(!ended.get(), "nobody is told anything after the cut");
        seen.extend(outcomes(&disk, file, 2));
    }
    assert_eq!(seen, set(&[&[0, 0], &[0, 1], &[1, 0], &[1, 1]]));
}

#[test]
fn after_the_cut_operations_fail_without_effect() {
    let disk = Disk::new(512);
    let file = disk.add_file(512, 1);
    disk.cut_power_at_turn(2);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 1)));
    let io = tasks.io().clone();
    tasks.spawn(async move {
        loop {
            match fill(&io, file, 0, 512, 1, true).await {
                512 | -4 | -11 => {}
                -5 => break,
                other => panic!("{other}"),
            }
        }
        assert_eq!(fill(&io, file, 0, 512, 9, true).await, -libc::EIO);
    });
    assert!(is_power_cut(&tasks.run().expect_err("the cut")));
    tasks.run().expect("errors are completions");
    disk.each_outcome(file, |_, bytes| assert!(bytes.is_none_or(|bytes| bytes[0] == 1)));
}

#[test]
fn a_file_grows_and_a_cut_may_take_that_back() {
    let disk = Disk::new(512);
    let file = disk.add_file(100, 1);
    run(&disk, 5, move |io| async move {
        fill(&io, file, 0, 100, 1, true).await;
        let mut buffer = io.buffer(1024).expect("memory");
        assert_eq!(io.read(file, 0, buffer.mem()).await, Ok(100));
        assert_eq!(io.read(file, 100, buffer.mem()).await, Ok(0));
        assert_eq!(fill(&io, file, 1000, 1000, 2, false).await, 1000);
        assert_eq!(io.read(file, 0, buffer.mem()).await, Ok(1024));
        assert_eq!((buffer.bytes_mut()[99], buffer.bytes()[100], buffer.bytes()[1023]), (1, 0, 2));
    });
    assert_eq!(disk.size(file), 2000);
    let sizes = |disk: &Disk| -> BTreeSet<u64> {
        (0..60).map(|seed| disk.after_power_cut(seed).size(file)).collect()
    };
    assert!(sizes(&disk).contains(&100) && sizes(&disk).contains(&2000));
    for seed in 0..60 {
        let left = disk.after_power_cut(seed);
        let past = byte(&left, file, 1500);
        assert!(left.size(file) == 2000 || past == 0, "nothing lies past the end");
        assert_eq!(byte(&left, file, 50), 1);
    }
    run(&disk, 5, move |io| async move { io.sync(file).await.expect("sync") });
    assert_eq!(sizes(&disk), BTreeSet::from([2000]));
}

#[test]
fn the_size_is_as_durable_as_the_write_that_needs_it() {
    for seed in 0..40 {
        let disk = Disk::new(512);
        let file = disk.add_file(0, 1);
        let mut tasks = Tasks::new(Box::new(Sim::new(&disk, seed).chances(Chances::NEVER)));
        let io = tasks.io().clone();
        let other = io.clone();
        tasks.spawn(async move {
            fill(&other, file, 512, 4096, 2, false).await;
        });
        tasks
            .block_on(async move {
                fill(&io, file, 0, 512, 1, true).await;
            })
            .expect("runs");
        for seed in 0..20 {
            assert_eq!(byte(&disk.after_power_cut(seed), file, 511), 1);
        }
        tasks.run().expect("runs");
    }
}

#[test]
fn holes_zeros_and_space() {
    let disk = Disk::new(512);
    let file = disk.add_file(4096, 1);
    disk.poke(file, 0, &[7; 4096]);
    assert_eq!(disk.allocated(file), 4096);
    run(&disk, 2, move |io| async move {
        io.to_the_end(Op::PunchHole { file, offset: 100, len: 1000 }).await.expect("punch");
        io.to_the_end(Op::ZeroRange { file, offset: 2048, len: 600 }).await.expect("zero");
    });
    let bytes = |disk: &Disk| -> Vec<u8> {
        [0, 99, 100, 600, 1099, 1100, 2047, 2048, 2647, 2648]
            .map(|at| byte(disk, file, at))
            .to_vec()
    };
    assert_eq!(bytes(&disk), [7, 7, 0, 0, 0, 7, 7, 0, 0, 7]);
    assert_eq!(disk.allocated(file), 4096 - 512);
    let seen = outcomes(&disk, file, 2);
    assert!(seen.contains(&vec![7, 7]) && seen.contains(&vec![7, 0]), "volatile until synced");
    run(&disk, 2, move |io| async move {
        io.sync(file).await.expect("sync");
        io.to_the_end(Op::Allocate { file, offset: 0, len: 8192 }).await.expect("allocate");
    });
    assert_eq!(outcomes(&disk, file, 2), set(&[&[7, 0]]));
    assert_eq!((disk.allocated(file), disk.size(file)), (8192, 4096));
    assert_eq!(bytes(&disk), [7, 7, 0, 0, 0, 7, 7, 0, 0, 7]);
}

#[test]
fn direct_transfers_are_aligned_but_for_the_end_of_the_file() {
    let disk = Disk::new(512);
    let file = disk.add_file(1000, 512);
    run(&disk, 2, move |io| async move {
        let buffer = io.buffer(2048).expect("memory");
        let read = |offset, skip, len| {
            io.run(Op::Read { file, offset, mem: buffer.mem().window(skip, len) })
        };
        assert_eq!(read(0, 0, 1024).await, 1000);
        assert_eq!(read(512, 512, 1024).await, 488);
        assert_eq!(read(1000, 1000, 24).await, 0);
        assert_eq!(read(1001, 0, 512).await, 0);
        for (offset, skip, len) in [(100, 0, 512), (0, 8, 512), (0, 0, 100)] {
            assert_eq!(read(offset, skip, len).await, -libc::EINVAL);
        }
        assert_eq!(io.read(file, 0, buffer.mem()).await, Ok(1000));
    });
}

#[test]
fn a_device_has_its_size() {
    let disk = Disk::new(512);
    let device = disk.add_device(4096, 512);
    run(&disk, 2, move |io| async move {
        assert_eq!(fill(&io, device, 3584, 1024, 1, false).await, 512);
        assert_eq!(fill(&io, device, 4096, 512, 1, false).await, -libc::ENOSPC);
        assert_eq!(fill(&io, device, 100, 512, 1, false).await, -libc::EINVAL);
        let run = |op| io.run(op);
        assert_eq!(
            run(Op::Allocate { file: device, offset: 0, len: 512 }).await,
            -libc::EOPNOTSUPP
        );
        assert_eq!(run(Op::PunchHole { file: device, offset: 0, len: 100 }).await, -libc::EINVAL);
        assert_eq!(run(Op::PunchHole { file: device, offset: 3584, len: 4096 }).await, 0);
    });
    assert_eq!((disk.size(device), byte(&disk, device, 4095)), (4096, 0));
}

#[test]
fn what_a_file_system_lacks_it_refuses() {
    let disk = Disk::new(512);
    let file = disk.add_file(4096, 1);
    disk.set_lacks(file, Lacks { punch: true, zero_range: true, allocate: true });
    run(&disk, 2, move |io| async move {
        for op in [
            Op::PunchHole { file, offset: 0, len: 512 },
            Op::ZeroRange { file, offset: 0, len: 512 },
            Op::Allocate { file, offset: 0, len: 512 },
        ] {
            assert_eq!(io.run(op).await, -libc::EOPNOTSUPP);
        }
    });
}

#[test]
fn a_full_disk_takes_what_fits() {
    let disk = Disk::new(512);
    let file = disk.add_file(1 << 20, 512);
    disk.limit_space(2048);
    run(&disk, 4, move |io| async move {
        assert_eq!(fill(&io, file, 0, 1024, 1, false).await, 1024);
        assert_eq!(fill(&io, file, 512, 4096, 2, false).await, 1536);
        assert_eq!(fill(&io, file, 8192, 512, 3, false).await, -libc::ENOSPC);
        assert_eq!(fill(&io, file, 0, 2048, 4, false).await, 2048);
        let zero = Op::ZeroRange { file, offset: 8192, len: 512 };
        assert_eq!(io.run(zero).await, -libc::ENOSPC);
        io.to_the_end(Op::PunchHole { file, offset: 0, len: 512 }).await.expect("punch");
        assert_eq!(fill(&io, file, 8192, 512, 5, false).await, 512);
    });
    assert_eq!((byte(&disk, file, 0), byte(&disk, file, 512), byte(&disk, file, 8192)), (0, 4, 5));
}

#[test]
fn the_chosen_operation_fails_and_the_next_does_not() {
    for (fault, expected) in
        [(Fault::Errno(libc::EIO), -libc::EIO), (Fault::Errno(libc::ENOSPC), -libc::ENOSPC)]
    {
        let disk = Disk::new(512);
        let file = disk.add_file(4096, 1);
        disk.fail_operations(2..3, fault);
        run(&disk, 4, move |io| async move {
            assert_eq!(fill(&io, file, 0, 512, 1, false).await, 512);
            assert_eq!(fill(&io, file, 512, 512, 1, false).await, expected);
            assert_eq!(fill(&io, file, 512, 512, 1, false).await, 512);
        });
        assert_eq!(disk.operations(), 3);
    }
    let disk = Disk::new(512);
    let file = disk.add_file(4096, 512);
    disk.fail_operations(1..2, Fault::Short);
    let moved = run(&disk, 4, move |io| async move { fill(&io, file, 0, 4096, 1, false).await });
    assert!((512..4096).contains(&moved) && moved % 512 == 0, "{moved}");
}

#[test]
fn bad_sectors_stop_a_transfer() {
    for seed in 0..20 {
        let disk = Disk::new(512);
        let file = disk.add_file(4096, 512);
        disk.break_range(file, 1024..1536, Refuses::Reads);
        run(&disk, seed, move |io| async move {
            let buffer = io.buffer(4096).expect("memory");
            let read = io.run(Op::Read { file, offset: 0, mem: buffer.mem() }).await;
            assert!(read == 1024 || read == -libc::EIO, "{read}");
            assert_eq!(io.read(file, 0, buffer.mem()).await, Err(libc::EIO));
            assert_eq!(io.read(file, 1536, buffer.mem()).await, Ok(2560));
            assert_eq!(fill(&io, file, 0, 4096, 1, false).await, 4096);
        });
        disk.break_range(file, 0..512, Refuses::Writes);
        run(&disk, seed, move |io| async move {
            let punch = Op::PunchHole { file, offset: 0, len: 4096 };
            assert_eq!(io.run(punch).await, -libc::EIO);
        });
    }
}

#[test]
fn a_failed_sync_may_forget() {
    for forgetful in [false, true] {
        let disk = Disk::new(512);
        let file = disk.add_file(512, 1);
        disk.forget_on_failed_sync(forgetful);
        disk.fail_operations(2..3, Fault::Errno(libc::EIO));
        run(&disk, 1, move |io| async move {
            fill(&io, file, 0, 512, 1, false).await;
            assert_eq!(io.sync(file).await, Err(libc::EIO));
            assert_eq!(io.sync(file).await, Ok(()));
        });
        let lost = outcomes(&disk, file, 1).contains(&vec![0]);
        assert_eq!(lost, forgetful);
        assert_eq!(byte(&disk, file, 0), 1);
    }
}

#[test]
fn short_transfers_and_interruptions_are_carried_on_with() {
    let (mut short, mut errors) = (0, BTreeSet::new());
    for seed in 0..200 {
        let disk = Disk::new(512);
        let file = disk.add_file(1 << 16, 512);
        let chances = Chances { short: 3, interrupted: 5, again: 5 };
        let mut tasks = Tasks::new(Box::new(Sim::new(&disk, seed).chances(chances)));
        let io = tasks.io().clone();
        let result = tasks
            .block_on(async move {
                let result = fill(&io, file, 0, 1 << 16, 1, false).await;
                let mut buffer = io.buffer(1 << 16).expect("memory");
                buffer.bytes_mut().fill(3);
                io.write(file, 0, buffer.mem(), false).await.expect("in the end");
                buffer.bytes_mut().fill(0);
                assert_eq!(io.read(file, 0, buffer.mem()).await, Ok(1 << 16));
                assert!(buffer.bytes().iter().all(|byte| *byte == 3));
                result
            })
            .expect("runs");
        short += u32::from((1..1 << 16).contains(&result));
        errors.extend((result < 0).then_some(-result));
    }
    assert!(short > 20, "{short}");
    assert_eq!(errors, BTreeSet::from([libc::EINTR, libc::EAGAIN]));
}

#[test]
fn operations_complete_in_any_order_and_the_seed_decides_it() {
    let order = |seed| {
        let disk = Disk::new(512);
        let file = disk.add_file(1 << 16, 1);
        let mut tasks = Tasks::new(Box::new(Sim::new(&disk, seed)));
        let log = Rc::new(RefCell::new(Vec::new()));
        for task in 0..8u64 {
            let (io, log) = (tasks.io().clone(), log.clone());
            tasks.spawn(async move {
                let result = fill(&io, file, task * 1024, 2048, task as u8, false).await;
                log.borrow_mut().push((io.now(), task, result));
            });
        }
        tasks.run().expect("runs");
        let left: Vec<u8> = {
            let left = disk.after_power_cut(seed);
            (0..20).map(|sector| byte(&left, file, sector * 512)).collect()
        };
        (log.take(), left, disk.turns())
    };
    let all: Vec<_> = (0..50).map(order).collect();
    let again: Vec<_> = (0..50).map(order).collect();
    assert_eq!(all, again);
    let orders: BTreeSet<Vec<u64>> =
        all.iter().map(|(log, ..)| log.iter().map(|(_, task, _)| *task).collect()).collect();
    assert!(orders.len() > 45, "{}", orders.len());
    assert!(all.iter().any(|(.., turns)| *turns > 3));
}

#[test]
fn time_passes_when_all_wait_for_it() {
    let disk = Disk::new(512);
    let (early, late) = run(&disk, 1, |io| async move {
        let began = io.now();
        assert_eq!(io.run(Op::Timeout { nanos: 5_000_000_000 }).await, -libc::ETIME);
        let middle = io.now();
        io.sleep(1).await;
        (middle - began, io.now() - middle)
    });
    assert!((5_000_000_000..5_001_000_000).contains(&early), "{early}");
    assert!(late < 1_000_000, "{late}");
}

#[test]
fn events_and_sockets() {
    let disk = Disk::new(512);
    let event = disk.add_event();
    let (left, right) = disk.add_sockets();
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 9)));
    let io = tasks.io().clone();
    let far = disk.clone();
    tasks.spawn(async move {
        let buffer = io.buffer(64).expect("memory");
        let mut got = Vec::new();
        loop {
            match io.run(Op::Recv { file: right, mem: buffer.mem() }).await {
                0 => break,
                n => got.extend_from_slice(&buffer.bytes()[..n as usize]),
            }
        }
        assert_eq!(got, b"hello");
        assert_eq!(io.run(Op::Send { file: right, mem: buffer.mem() }).await, -libc::EPIPE);
        assert_eq!(io.run(Op::SignalEvent { file: event }).await, 8);
    });
    let io = tasks.io().clone();
    tasks
        .block_on(async move {
            let mut buffer = io.buffer(5).expect("memory");
            buffer.bytes_mut().copy_from_slice(b"hello");
            let mut sent = 0;
            while sent < 5 {
                let mem = buffer.mem().window(sent, 5);
                sent += io.run(Op::Send { file: left, mem }).await as usize;
            }
            far.close(left);
            assert_eq!(io.run(Op::ReadEvent { file: event }).await, 8);
            assert_eq!(io.run(Op::Recv { file: left, mem: buffer.mem() }).await, -libc::EBADF);
        })
        .expect("runs");
}

#[test]
fn what_waits_is_cancelled() {
    let disk = Disk::new(512);
    let event = disk.add_event();
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 2)));
    let (io, other) = (tasks.io().clone(), tasks.io().clone());
    tasks.spawn(async move {
        assert_eq!(io.run(Op::ReadEvent { file: event }).await, -libc::ECANCELED);
    });
    tasks.spawn(async move {
        other.sleep(1_000_000).await;
        assert_eq!(other.run(Op::Cancel { file: event }).await, 1);
    });
    tasks.run().expect("runs");
}

#[test]
fn a_task_that_waits_for_ever_is_told() {
    let disk = Disk::new(512);
    let event = disk.add_event();
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 2)));
    let io = tasks.io().clone();
    tasks.spawn(async move {
        io.run(Op::ReadEvent { file: event }).await;
    });
    let error = tasks.run().expect_err("nobody signals");
    assert!(is_stuck(&error), "{error}");
    drop(tasks);
}

#[test]
fn a_cut_at_every_turn_may_be_looked_at_without_one() {
    let disk = Disk::new(512);
    let file = disk.add_file(512, 1);
    let seen = Rc::new(RefCell::new(Vec::new()));
    let log = seen.clone();
    let sim = Sim::new(&disk, 3).chances(Chances::NEVER).at_every_turn(move |cut| {
        let mut values = Vec::new();
        cut.each_outcome(file, |_, bytes| values.push(bytes.map_or(0, |bytes| bytes[0])));
        log.borrow_mut().push(values);
    });
    let mut tasks = Tasks::new(Box::new(sim));
    let io = tasks.io().clone();
    tasks.spawn(async move {
        fill(&io, file, 0, 512, 1, false).await;
        io.sync(file).await.expect("sync");
        fill(&io, file, 0, 512, 2, true).await;
        fill(&io, file, 0, 512, 3, false).await;
    });
    tasks.run().expect("runs");
    let mut seen = seen.take();
    assert_eq!(seen.len() as u64, disk.turns());
    seen.dedup();
    assert_eq!(seen, [vec![0, 1], vec![1, 2], vec![2, 3]]);
    assert_eq!(byte(&disk, file, 0), 3);
}
