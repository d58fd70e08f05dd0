//! VHDs written by turns by QEMU and by us: each reads what the other wrote.

use std::path::Path;
use std::process::Command;

use ringtap_image::vhd::{self, CreateOptions, Kind as VhdKind, Parent};
use ringtap_image::{CacheMode, Container, Format, OpenError, OpenOptions, on_a_ring, open_on};
use ringtap_io::Io;
use ringtap_vbd::{Kind, Request, Vbd};

/// Run a program with a time limit; gives what it printed.
fn tool(args: &[&str]) -> String {
    let output = Command::new("timeout").arg("60").args(args).output().expect("timeout runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {text}{error}");
    text
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn options(cache: CacheMode, read_only: bool) -> OpenOptions {
    OpenOptions { format: Some(Format::Vhd), cache, read_only, ..OpenOptions::default() }
}

/// The cache mode, or one that the file system of temporary files can do.
fn usable(path: &Path, cache: CacheMode) -> CacheMode {
    match Container::open(path, &options(cache, true)) {
        Ok(_) => cache,
        Err(_) => CacheMode::Writeback,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64, u8),
    Zero(u64, u64),
    Flush,
}

fn steps(rng: &mut fastrand::Rng, size: u64, count: usize) -> Vec<Step> {
    (0..count)
        .map(|_| {
            let len = 512 * if rng.u8(0..8) == 0 { rng.u64(1..4000) } else { rng.u64(1..64) };
            let offset = 512 * rng.u64(0..=(size - len) / 512);
            match rng.u8(0..10) {
                0 => Step::Flush,
                1 | 2 => Step::Zero(offset, len),
                _ => Step::Write(offset, len, rng.u8(1..)),
            }
        })
        .collect()
}

fn apply(model: &mut [u8], steps: &[Step]) {
    for step in steps {
        match step {
            Step::Write(offset, len, byte) => {
                model[*offset as usize..(offset + len) as usize].fill(*byte);
            }
            Step::Zero(offset, len) => model[*offset as usize..(offset + len) as usize].fill(0),
            Step::Flush => {}
        }
    }
}

fn by_qemu(path: &Path, steps: &[Step]) {
    let mut args = vec!["qemu-io".to_owned(), "-f".to_owned(), "vpc".to_owned()];
    for step in steps {
        args.push("-c".to_owned());
        args.push(match step {
            Step::Write(offset, len, byte) => format!("write -P {byte} {offset} {len}"),
            Step::Zero(offset, len) => format!("write -z {offset} {len}"),
            Step::Flush => "flush".to_owned(),
        });
    }
    args.push(text(path).to_owned());
    tool(&args.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Carry the steps out, read all, and close in good order.
fn by_us(path: &Path, cache: CacheMode, steps: Vec<Step>) -> Vec<u8> {
    by_us_until(path, cache, steps, true)
}

/// As [`by_us`]; without `close` the image stays as a killed server leaves it.
fn by_us_until(path: &Path, cache: CacheMode, steps: Vec<Step>, close: bool) -> Vec<u8> {
    let owned = path.to_owned();
    let all = on_a_ring(path, |io| async move {
        let vbd = Vbd::new(open_on(&io, &owned, &options(cache, false)).await?, cache);
        let ask = async |kind, offset, len, mem| {
            let request = Request { kind, offset, len, mem, fua: false };
            vbd.serve(&io, request).await.expect("served");
        };
        for step in steps {
            match step {
                Step::Write(offset, len, byte) => {
                    let mut buffer = io.buffer(len as usize).expect("memory");
                    buffer.bytes_mut().fill(byte);
                    ask(Kind::Write, offset, len, buffer.mem()).await;
                }
                Step::Zero(offset, len) => {
                    let kind = Kind::WriteZeroes { unmap: offset % 1024 == 0, fast: false };
                    ask(kind, offset, len, ringtap_io::Mem::EMPTY).await;
                }
                Step::Flush => ask(Kind::Flush, 0, 0, ringtap_io::Mem::EMPTY).await,
            }
        }
        if close {
            vbd.close(&io).await.expect("closed");
        }
        let buffer = io.buffer(vbd.size() as usize).expect("memory");
        ask(Kind::Read, 0, vbd.size(), buffer.mem()).await;
        Ok::<_, OpenError>(buffer.bytes().to_vec())
    });
    all.expect("a ring").expect("opened")
}

fn create(
    path: &Path,
    cache: CacheMode,
    kind: VhdKind,
    size: u64,
    force_size: bool,
    parent: Option<&Path>,
) {
    std::fs::File::create(path).expect("made");
    let (owned, parent) = (path.to_owned(), parent.map(Path::to_owned));
    let made = on_a_ring(path, |io: Io| async move {
        let parent = match parent {
            Some(parent) => {
                let container = Container::open(&parent, &options(CacheMode::Writeback, true))?;
                Some(Parent::read(&io, &container).await?)
            }
            None => None,
        };
        let container = Container::open(&owned, &options(cache, false))?;
        let options = CreateOptions { size, kind, force_size, block_size: None, parent, id: None };
        vhd::create(&io, &container, &options).await
    });
    made.expect("a ring").expect("created");
}

/// Our check finds nothing to complain about.
fn check(path: &Path) {
    let owned = path.to_owned();
    let report = on_a_ring(path, |io| async move {
        let container = Container::open(&owned, &options(CacheMode::Writeback, true))?;
        vhd::check(&io, &container, false).await
    });
    let report = report.expect("a ring").expect("a report");
    assert_eq!((&report.corruptions, &report.footers), (&vec![], &vec![]), "{}", path.display());
}

fn compare(image: &Path, model: &[u8]) {
    let raw = image.with_extension("raw");
    std::fs::write(&raw, model).expect("written");
    tool(&["qemu-img", "compare", "-f", "vpc", "-F", "raw", text(image), text(&raw)]);
}

#[test]
fn qemu_and_we_write_by_turns() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut number = 0;
    for (subformat, kind) in [("dynamic", VhdKind::Dynamic), ("fixed", VhdKind::Fixed)] {
        for force in [false, true] {
            for made_by_qemu in [false, true] {
                for cache in [CacheMode::None, CacheMode::Writeback] {
                    number += 1;
                    let mut rng = fastrand::Rng::with_seed(number);
                    let path = folder.path().join(format!("{number}.vhd"));
                    let size = (12 << 20) + 512 * rng.u64(0..100);
                    let asked = size.to_string();
                    if made_by_qemu {
                        let force = if force { "on" } else { "off" };
                        let options = format!("subformat={subformat},force_size={force}");
                        tool(&[
                            "qemu-img",
                            "create",
                            "-q",
                            "-f",
                            "vpc",
                            "-o",
                            &options,
                            text(&path),
                            &asked,
                        ]);
                    } else {
                        std::fs::File::create(&path).expect("made");
                        create(&path, usable(&path, cache), kind, size, force, None);
                    }
                    let cache = usable(&path, cache);
                    let context = format!("{subformat}, {force}, {made_by_qemu}, {cache:?}");
                    let mut model = vec![0; by_us(&path, cache, vec![]).len()];
                    assert!(model.len() as u64 >= size && (!force || model.len() as u64 == size));
                    let info =
                        tool(&["qemu-img", "info", "-f", "vpc", "--output=json", text(&path)]);
                    let told = format!("\"virtual-size\": {}", model.len());
                    assert!(info.contains(&told), "{context}: {info} {told}");
                    for _ in 0..2 {
                        let some = steps(&mut rng, model.len() as u64, 15);
                        apply(&mut model, &some);
                        assert!(by_us(&path, cache, some) == model, "{context}: we read otherwise");
                        compare(&path, &model);
                        let some = steps(&mut rng, model.len() as u64, 15);
                        apply(&mut model, &some);
                        by_qemu(&path, &some);
                        let read = by_us(&path, cache, vec![]);
                        let wrong = read.iter().zip(&model).position(|(read, model)| read != model);
                        assert_eq!(wrong, None, "{context}: not what QEMU wrote: {some:?}");
                        check(&path);
                    }
                    compare(&path, &model);
                }
            }
        }
    }
}

#[test]
fn children_show_their_parents_and_hide_what_was_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut rng = fastrand::Rng::with_seed(7);
    let base = folder.path().join("base.vhd");
    tool(&["qemu-img", "create", "-q", "-f", "vpc", text(&base), "9M"]);
    let mut model = vec![0; by_us(&base, CacheMode::Writeback, vec![]).len()];
    let some = steps(&mut rng, model.len() as u64, 20);
    apply(&mut model, &some);
    by_qemu(&base, &some);
    let (mut below, mut old) = (base.clone(), vec![]);
    for depth in 0..3 {
        let child = folder.path().join(format!("child {depth}.vhd"));
        std::fs::File::create(&child).expect("made");
        let cache = usable(&child, CacheMode::None);
        create(&child, cache, VhdKind::Differencing, 0, false, Some(&below));
        assert!(by_us(&child, cache, vec![]) == model, "a new child is its parent");
        old.push((below.clone(), model.clone()));
        for _ in 0..2 {
            let some = steps(&mut rng, model.len() as u64, 25);
            apply(&mut model, &some);
            assert!(by_us(&child, cache, some) == model);
        }
        check(&child);
        below = child;
    }
    for (path, model) in &old[1..] {
        assert!(by_us(path, CacheMode::Writeback, vec![]) == *model, "a parent keeps its bytes");
    }
    compare(&base, &old[0].1);
    // What was changed under a child's feet, or is another image, is no parent.
    let moved = folder.path().join("moved");
    std::fs::create_dir(&moved).expect("made");
    let lonely = moved.join("lonely.vhd");
    std::fs::copy(&below, &lonely).expect("copied");
    let refused = |path: &Path| {
        let error = ringtap_image::open(path, &options(CacheMode::Writeback, true)).err();
        error.expect("refused").to_string()
    };
    assert!(refused(&lonely).contains("--backing"), "{}", refused(&lonely));
    std::fs::copy(&base, moved.join("child 1.vhd")).expect("copied");
    assert!(refused(&lonely).contains("unique ids differ"), "{}", refused(&lonely));
    // A ring: the parent's name leads back.
    let ring = folder.path().join("ring.vhd");
    std::fs::copy(&below, &ring).expect("copied");
    std::fs::remove_file(folder.path().join("child 1.vhd")).expect("removed");
    std::os::unix::fs::symlink(&ring, folder.path().join("child 1.vhd")).expect("linked");
    assert!(refused(&ring).contains("rings"), "{}", refused(&ring));
}

/// A footer that is lost is found again at the other end of the file.
#[test]
fn one_footer_is_enough() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.vhd");
    create(&path, CacheMode::Writeback, VhdKind::Dynamic, 9 << 20, true, None);
    let mut model = vec![0; 9 << 20];
    let some = steps(&mut fastrand::Rng::with_seed(3), 9 << 20, 20);
    apply(&mut model, &some);
    by_us(&path, CacheMode::Writeback, some);
    let repair = |path: &Path| {
        let owned = path.to_owned();
        let report = on_a_ring(path, |io| async move {
            let container = Container::open(&owned, &options(CacheMode::Writeback, false))?;
            vhd::check(&io, &container, true).await
        });
        report.expect("a ring").expect("a report")
    };
    let file = std::fs::File::options().read(true).write(true).open(&path).expect("opened");
    let len = file.metadata().expect("facts").len();
    for at in [0, len - 512] {
        file.write_all_at(&[0; 512], at).expect("written");
        assert!(by_us(&path, CacheMode::Writeback, vec![]) == model, "one is enough");
        // Ours made it good by itself; break it again for the check to find.
        file.write_all_at(&[0; 512], at).expect("written");
        let report = repair(&path);
        assert_eq!((report.footers.len(), report.repaired), (1, 1), "{report:?}");
        assert_eq!(repair(&path).footers, Vec::<String>::new());
        compare(&path, &model);
    }
    file.write_all_at(&[0; 512], 0).expect("written");
    file.write_all_at(&[0; 512], file.metadata().expect("facts").len() - 512).expect("written");
    assert!(ringtap_image::open(&path, &options(CacheMode::Writeback, true)).is_err());
}

/// What was flushed, QEMU finds in an image whose server was killed.
#[test]
fn qemu_reads_what_a_killed_server_flushed() {
    let folder = tempfile::tempdir().expect("a folder");
    for seed in 0..6 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let path = folder.path().join(format!("{seed}.vhd"));
        create(&path, CacheMode::Writeback, VhdKind::Dynamic, 24 << 20, true, None);
        let cache = usable(&path, CacheMode::None);
        let mut model = vec![0; 24 << 20];
        for _ in 0..2 {
            let mut some = steps(&mut rng, 24 << 20, 15);
            some.push(Step::Flush);
            apply(&mut model, &some);
            assert!(by_us_until(&path, cache, some, false) == model);
            compare(&path, &model);
        }
        assert!(by_us(&path, cache, vec![Step::Write(0, 512, 1)]).starts_with(&[1; 512]));
        model[..512].fill(1);
        let some = steps(&mut rng, 24 << 20, 15);
        apply(&mut model, &some);
        by_qemu(&path, &some);
        compare(&path, &model);
        assert!(by_us(&path, cache, vec![]) == model, "seed {seed}");
        check(&path);
    }
}

/// Two queue threads, each with many requests in flight, allocate in the same blocks.
#[test]
fn queue_threads_share_an_image() {
    const SIZE: u64 = 24 << 20;
    const PIECE: u64 = 3072;
    let folder = tempfile::tempdir().expect("a folder");
    let base = folder.path().join("base.vhd");
    create(&base, CacheMode::Writeback, VhdKind::Dynamic, SIZE, true, None);
    let below = by_us(&base, CacheMode::Writeback, vec![Step::Write(0, SIZE, 200)]);
    assert!(below.iter().all(|byte| *byte == 200));
    for (name, parent, rest) in [("alone.vhd", None, 0), ("child.vhd", Some(&*base), 200)] {
        let path = folder.path().join(name);
        let kind = if parent.is_some() { VhdKind::Differencing } else { VhdKind::Dynamic };
        create(&path, CacheMode::Writeback, kind, SIZE, true, parent);
        let cache = usable(&path, CacheMode::None);
        let owned = path.clone();
        let image =
            on_a_ring(
                &path,
                |io| async move { open_on(&io, &owned, &options(cache, false)).await },
            );
        let vbd = Vbd::new(image.expect("a ring").expect("opened"), cache);
        let threads: Vec<_> = (0..2u64)
            .map(|thread| {
                let disk = vbd.disk().clone();
                std::thread::spawn(move || {
                    let vbd = std::rc::Rc::new(disk.fork());
                    let ring = ringtap_io::Ring::new().expect("a ring");
                    let mut tasks = ringtap_io::Tasks::new(Box::new(ring));
                    for slot in 0..16u64 {
                        let (io, vbd) = (tasks.io().clone(), vbd.clone());
                        tasks.spawn(async move {
                            // Every other piece is another thread's, and every 32nd this slot's.
                            for round in 0..40 {
                                let number = (round * 67 % 240) * 32 + slot * 2 + thread;
                                let (kind, mut buffer) =
                                    (Kind::Write, io.buffer(PIECE as usize).expect("memory"));
                                buffer.bytes_mut().fill((number % 199 + 1) as u8);
                                let (offset, mem) = (number * PIECE, buffer.mem());
                                let fua = round % 16 == 0;
                                let request = Request { kind, offset, len: PIECE, mem, fua };
                                vbd.serve(&io, request).await.expect("written");
                            }
                        });
                    }
                    tasks.run().expect("runs");
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("a thread");
        }
        on_a_ring(&path, |io| async move { vbd.close(&io).await })
            .expect("a ring")
            .expect("closed");
        let mut model = vec![rest; SIZE as usize];
        for number in (0..40).flat_map(|round| (0..32).map(move |at| (round * 67 % 240) * 32 + at))
        {
            let at = (number * PIECE) as usize;
            model[at..at + PIECE as usize].fill((number % 199 + 1) as u8);
        }
        check(&path);
        assert!(by_us(&path, cache, vec![]) == model, "{name}");
        if parent.is_none() {
            compare(&path, &model);
        }
    }
}
