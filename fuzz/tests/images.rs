//! VHD, VHDX and VMDK with arbitrary bytes in their structures: each is refused or served, at once and in
//! little memory, and what is served answers every request.
//!
//! The input: which image to begin with, then changes of five bytes each: where (four bytes, little-endian,
//! modulo what the structures take) and the new value. Checksums are made right afterwards, as a
//! hostile author would, unless the first byte's highest bit is set.

mod common;

use std::time::{Duration, Instant};

use ringtap_image::vhd::{self, CreateOptions, Kind as VhdKind, Parent};
use ringtap_image::{Boxed, CacheMode, Container, Image, OpenError, Traits, vhdx, vmdk};
use ringtap_io::{File, Io};
use ringtap_sim::Disk;
use ringtap_vbd::{Kind, Request, Vbd};

use common::{Writes, run, use_image};

/// Long enough for a loaded machine; an honest run takes milliseconds.
const LIMIT: Duration = Duration::from_secs(10);

fn container(disk: &Disk, file: File, read_only: bool) -> Container {
    let traits = Traits { read_only, ..Traits::FILE };
    Container::simulated(file, disk.size(file), traits)
}

/// Change bytes of an image as the input says. Places in the first part are the likelier.
fn change(image: &mut [u8], changes: &[u8]) {
    for change in changes.chunks_exact(5) {
        let [a, b, c, d, value] = change else { continue };
        let place = u32::from_le_bytes([*a, *b, *c, *d]) as usize % image.len();
        image[place] = *value;
    }
}

type Opened<'a> = Boxed<'a, Result<Box<dyn Image>, OpenError>>;

fn try_image(
    disk: &Disk,
    file: File,
    image: &[u8],
    read_only: bool,
    open: impl for<'a> Fn(&'a Io, Container) -> Opened<'a> + 'static,
) {
    disk.poke(file, 0, image);
    let container = container(disk, file, read_only);
    let began = Instant::now();
    run(disk, move |io| async move {
        match open(&io, container).await {
            Ok(image) => use_image(&io, image, Writes::ReadBack).await,
            Err(error) => assert!(error.to_string().len() > 20, "{error}"),
        }
    });
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
}

/// The sum that footers and dynamic headers have, over all bytes but its own.
fn vhd_sum(bytes: &mut [u8], at: usize) {
    bytes[at..at + 4].fill(0);
    let sum: u32 = bytes.iter().map(|byte| u32::from(*byte)).sum();
    bytes[at..at + 4].copy_from_slice(&(!sum).to_be_bytes());
}

#[test]
fn vhd() {
    bolero::check!().for_each(|input: &[u8]| {
        let [first, changes @ ..] = input else { return };
        let kind =
            [VhdKind::Fixed, VhdKind::Dynamic, VhdKind::Differencing][usize::from(first % 3)];
        let disk = Disk::new(512);
        let (base, file) = (disk.add_file(0, 1), disk.add_file(0, 1));
        let make = |file, kind, parent: Option<File>| {
            let again = disk.clone();
            run(&disk, move |io| async move {
                let parent = match parent {
                    Some(parent) => {
                        let parent = container(&again, parent, true);
                        Some(Parent::read(&io, &parent).await.expect("a VHD"))
                    }
                    None => None,
                };
                let options = CreateOptions {
                    size: 256 << 10,
                    kind,
                    force_size: true,
                    block_size: Some(16 << 10),
                    parent,
                    id: Some([1; 16]),
                };
                let made = container(&again, file, false);
                vhd::create(&io, &made, &options).await.expect("made");
            });
        };
        let differencing = kind == VhdKind::Differencing;
        make(base, VhdKind::Fixed, None);
        make(file, kind, differencing.then_some(base));
        let mut image = vec![0; disk.size(file) as usize];
        disk.peek(file, 0, &mut image);
        // What the structures take: all but a fixed disk's bytes.
        let begins = if kind == VhdKind::Fixed { image.len() - 512 } else { 0 };
        change(&mut image[begins..], changes);
        if first & 128 == 0 {
            let end = image.len() - 512;
            vhd_sum(&mut image[end..], 64);
            if kind != VhdKind::Fixed {
                vhd_sum(&mut image[..512], 64);
                vhd_sum(&mut image[512..1536], 36);
            }
        }
        let again = disk.clone();
        disk.poke(file, 0, &image);
        let looked = container(&disk, file, true);
        let began = Instant::now();
        run(&disk, |io| async move {
            let _report = vhd::check(&io, &looked, false).await;
        });
        assert!(began.elapsed() < LIMIT);
        try_image(&disk, file, &image, false, move |io, opened| {
            let parent = container(&again, base, true);
            Box::pin(async move {
                let parent = match differencing {
                    true => Some(vhd::open_in(io, parent, None).await?),
                    false => None,
                };
                vhd::open_in(io, opened, parent).await
            })
        });
    });
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

fn guid(text: &str) -> [u8; 16] {
    let hex: String = text.chars().filter(|c| *c != '-').collect();
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("hex");
    [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15].map(byte)
}

const MIB: usize = 1 << 20;
/// The structures of the VHDX below: headers, regions, log, metadata, table. Changes go there.
const PARTS: [(usize, usize); 6] = [
    (65536, 128),
    (196_608, 96),
    (MIB, 3 * 4096),
    (2 * MIB, 256),
    (2 * MIB + 65536, 64),
    (3 * MIB, 64),
];

/// A VHDX of 4 MiB with one block, and one more that only the log knows.
fn a_vhdx() -> Vec<u8> {
    let mut image = vec![0; 6 * MIB];
    put(&mut image, 0, b"vhdxfile");
    put(&mut image, 65536, b"head");
    put(&mut image, 65536 + 48, &[9; 16]);
    put(&mut image, 65536 + 66, &[1, 0]);
    put(&mut image, 65536 + 68, &(12288u32).to_le_bytes());
    put(&mut image, 65536 + 72, &(MIB as u64).to_le_bytes());
    put(&mut image, 196_608, b"regi");
    put(&mut image, 196_616, &2u32.to_le_bytes());
    let regions = [
        ("2DC27766-F623-4200-9D64-115E9BFD4A08", 3 * MIB),
        ("8B7CA206-4790-4B9A-B8FE-575F050F886E", 2 * MIB),
    ];
    for (index, (name, at)) in regions.into_iter().enumerate() {
        let entry = 196_624 + 32 * index;
        put(&mut image, entry, &guid(name));
        put(&mut image, entry + 16, &(at as u64).to_le_bytes());
        put(&mut image, entry + 24, &(MIB as u32).to_le_bytes());
        put(&mut image, entry + 28, &[1]);
    }
    put(&mut image, 2 * MIB, b"metadata");
    put(&mut image, 2 * MIB + 10, &[3, 0]);
    let items: [(&str, &[u8]); 3] = [
        ("CAA16737-FA36-4D43-B3B6-33F0AA44E76B", &(MIB as u64).to_le_bytes()),
        ("2FA54224-CD1B-4876-B211-5DBED83BF4B8", &(4 * MIB as u64).to_le_bytes()),
        ("8141BF1D-A96F-4709-BA47-F233A8FAAB5F", &512u32.to_le_bytes()),
    ];
    for (index, (name, value)) in items.into_iter().enumerate() {
        let (entry, at) = (2 * MIB + 32 + 32 * index, 65536 + 16 * index);
        put(&mut image, entry, &guid(name));
        put(&mut image, entry + 16, &(at as u32).to_le_bytes());
        put(&mut image, entry + 20, &(value.len() as u32).to_le_bytes());
        put(&mut image, entry + 24, &[6]);
        put(&mut image, 2 * MIB + at, value);
    }
    put(&mut image, 3 * MIB, &(4 * MIB as u64 | 6).to_le_bytes());
    // The log: one entry with one sector, which is the table with one block more.
    put(&mut image, MIB, b"loge");
    put(&mut image, MIB + 8, &8192u32.to_le_bytes());
    put(&mut image, MIB + 16, &[5]);
    put(&mut image, MIB + 24, &[1]);
    put(&mut image, MIB + 32, &[9; 16]);
    put(&mut image, MIB + 64, b"desc");
    put(&mut image, MIB + 72, &(4 * MIB as u64 | 6).to_le_bytes());
    put(&mut image, MIB + 80, &(3 * MIB as u64).to_le_bytes());
    put(&mut image, MIB + 88, &[5]);
    put(&mut image, MIB + 4096, b"data");
    put(&mut image, MIB + 4096 + 8, &(5 * MIB as u64 | 6).to_le_bytes());
    put(&mut image, MIB + 8192 - 4, &[5]);
    vhdx_sums(&mut image);
    image
}

fn vhdx_sums(image: &mut [u8]) {
    let log = u32::from_le_bytes(image[MIB + 8..MIB + 12].try_into().expect("4 bytes")) as usize;
    let log = log.clamp(4096, 12288);
    for (at, len) in [(65536, 4096), (196_608, 65536), (MIB, log)] {
        put(image, at + 4, &[0; 4]);
        let sum = crc32c::crc32c(&image[at..at + len]);
        put(image, at + 4, &sum.to_le_bytes());
    }
}

fn open_vhdx(io: &Io, container: Container) -> Opened<'_> {
    Box::pin(vhdx::open_in(io, container))
}

#[test]
fn the_vhdx_to_begin_with_is_whole() {
    let disk = Disk::new(4096);
    let file = disk.add_file(0, 1);
    let mut image = a_vhdx();
    put(&mut image, 4 * MIB, &[1; 512]);
    put(&mut image, 5 * MIB, &[2; 512]);
    disk.poke(file, 0, &image);
    let container = container(&disk, file, true);
    run(&disk, |io| async move {
        let vbd = Vbd::new(open_vhdx(&io, container).await.expect("whole"), CacheMode::None);
        assert_eq!(vbd.size(), 4 * MIB as u64);
        for (offset, byte) in [(0, 1), (MIB as u64, 2), (2 * MIB as u64, 0)] {
            let buffer = io.buffer(512).expect("memory");
            let mem = buffer.mem();
            let request = Request { kind: Kind::Read, offset, len: 512, mem, fua: false };
            vbd.serve(&io, request).await.expect("read");
            assert_eq!(buffer.bytes(), [byte; 512], "the log counts");
        }
    });
}

#[test]
fn vhdx_image() {
    let whole = a_vhdx();
    bolero::check!().for_each(|input: &[u8]| {
        let [first, changes @ ..] = input else { return };
        let mut parts: Vec<u8> =
            PARTS.iter().flat_map(|(at, len)| whole[*at..at + len].to_vec()).collect();
        change(&mut parts, changes);
        let mut image = whole.clone();
        let mut from = 0;
        for (at, len) in PARTS {
            put(&mut image, at, &parts[from..from + len]);
            from += len;
        }
        if first & 128 == 0 {
            vhdx_sums(&mut image);
        }
        let disk = Disk::new(4096);
        let file = disk.add_file(image.len() as u64, 1);
        // Only what is not zeros: the simulation keeps every sector that has space.
        for (at, len) in
            [(0, 4096), (65536, 4096), (196_608, 65536), (MIB, 12288), (2 * MIB, 69632)]
        {
            disk.poke(file, at as u64, &image[at..at + len]);
        }
        try_image(&disk, file, &[], true, open_vhdx);
        disk.poke(file, 3 * MIB as u64, &image[3 * MIB..3 * MIB + 4096]);
        try_image(&disk, file, &[], true, open_vhdx);
    });
}

/// A sparse extent: header, descriptor, directory, one table, one grain.
fn a_vmdk(compressed: bool) -> Vec<u8> {
    let mut image = vec![0; 32 * 512];
    put(&mut image, 0, b"KDMV\x01\0\0\0");
    put(&mut image, 8, &(3u32 | u32::from(compressed) << 16).to_le_bytes());
    let longs = [(12, 64u64), (20, 8), (28, 1), (36, 1), (48, 2), (56, 2), (64, 16)];
    for (at, value) in longs {
        put(&mut image, at, &value.to_le_bytes());
    }
    put(&mut image, 44, &512u32.to_le_bytes());
    put(&mut image, 77, &[u8::from(compressed)]);
    put(&mut image, 512, b"# Disk DescriptorFile\nparentCID=ffffffff\nRW 64 SPARSE \"a.vmdk\"\n");
    put(&mut image, 1024, &3u32.to_le_bytes());
    put(&mut image, 1536 + 4, &16u32.to_le_bytes());
    if compressed {
        // Its place, its length, then one stored block of deflate with its sum missing.
        put(&mut image, 16 * 512, &8u64.to_le_bytes());
        put(&mut image, 16 * 512 + 8, &20u32.to_le_bytes());
        put(&mut image, 16 * 512 + 12, &[0x78, 0x01, 0x01, 4, 0, 0xfb, 0xff, 1, 2, 3, 4]);
    }
    image
}

fn open_vmdk(io: &Io, container: Container) -> Opened<'_> {
    Box::pin(vmdk::open_in(io, container))
}

#[test]
fn vmdk_image() {
    bolero::check!().for_each(|input: &[u8]| {
        let [first, changes @ ..] = input else { return };
        let disk = Disk::new(512);
        let file = disk.add_file(0, 1);
        if first % 3 == 2 {
            let text = [b"# Disk DescriptorFile\n", changes].concat();
            try_image(&disk, file, &text, true, open_vmdk);
            return;
        }
        let mut image = a_vmdk(first % 3 == 1);
        let structures = 4 * 512 + 64;
        change(&mut image[..structures], changes);
        try_image(&disk, file, &image, true, open_vmdk);
    });
}
