//! Large reads that are answered with the page cache's own pages.

use std::fs;

use ringtap_export::nbd::wire::cmd;
use ringtap_image::{CacheMode, Format, OpenOptions};

use crate::harness::{How, Served, assert_same, direct, file, run};
use crate::raw::{Raw, Reply, request};

const MIB: usize = 1 << 20;

/// No page of it is zeros, and no two are alike.
fn dense(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 4096 * 7 + at % 251 + 1) as u8 | 1).collect()
}

/// Reads served by the image, two for each that came through a pipe.
fn reads_of(served: &Served, ask: impl FnOnce()) -> u64 {
    let before = served.vbd.stats().read.ended;
    ask();
    served.vbd.stats().read.ended - before
}

fn read(raw: &mut Raw, offset: usize, len: usize) -> Vec<u8> {
    raw.send(&request(cmd::READ, 0, 9, offset as u64, len as u32));
    assert_eq!(raw.reply(), Reply::Simple { error: 0, cookie: 9 });
    raw.take(len)
}

#[test]
fn more_reads_at_once_than_there_are_pipes_come_in_one_piece_each() {
    let content = dense(20 * MIB + 1536);
    let served = file(&content, How::default());
    let mut raw = Raw::transmit(&served.socket);
    let lens = [256 << 10, MIB, (256 << 10) + 1, MIB - 512, 700_001, (256 << 10) - 1, MIB + 1];
    let mut asked = vec![];
    for turn in 0..40 {
        let len = lens[turn % lens.len()];
        let offset = [turn * 4099, content.len() - len][turn % 5 / 4];
        raw.send(&request(cmd::READ, 0, turn as u64, offset as u64, len as u32));
        asked.push(Some((offset, len)));
    }
    for _ in 0..asked.len() {
        let Reply::Simple { error: 0, cookie } = raw.reply() else { panic!("a read failed") };
        let (offset, len) = asked[cookie as usize].take().expect("asked for, and once");
        assert_same(&raw.take(len), &content[offset..offset + len]);
    }
}

#[test]
fn pages_are_lent_where_they_stay_what_they_are() {
    let content = dense(4 * MIB);
    let cached = file(&content, How::default());
    let mut raw = Raw::transmit(&cached.socket);
    let reads = reads_of(&cached, || {
        assert_same(&read(&mut raw, 4096, MIB), &content[4096..4096 + MIB]);
    });
    assert_eq!(reads, 2, "the tail, and what is before it through a pipe");
    for (offset, len) in [(0, 4096), (0, (256 << 10) - 1), (0, 2 * MIB)] {
        let reads = reads_of(&cached, || {
            assert_same(&read(&mut raw, offset, len), &content[offset..offset + len]);
        });
        assert_eq!(reads, 1, "{len}");
    }
    // A cluster may come to hold something else before the client has taken its bytes.
    let source = cached.dir.path().join("source");
    let target = cached.dir.path().join("image.qcow2");
    fs::write(&source, &content).expect("written");
    run("qemu-img", &["convert", "-fraw", "-Oqcow2", path(&source), path(&target)]);
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        cache: CacheMode::Writeback,
        ..OpenOptions::default()
    };
    let image = ringtap_image::open(&target, &options).expect("the image opens");
    let formatted = crate::harness::image(image, How::default());
    let mut raw = Raw::transmit(&formatted.socket);
    // Where its clusters lie is not in memory at first.
    for _ in 0..2 {
        let reads = reads_of(&formatted, || {
            assert_same(&read(&mut raw, 0, MIB), &content[..MIB]);
        });
        assert_eq!(reads, 1);
    }
    let uncached = file(&content, direct());
    let mut raw = Raw::transmit(&uncached.socket);
    let reads = reads_of(&uncached, || {
        assert_same(&read(&mut raw, 0, MIB), &content[..MIB]);
    });
    assert_eq!(reads, 1);
}

#[test]
fn a_file_cut_under_way_reads_as_zeros_and_the_connection_goes_on() {
    let mut content = dense(4 * MIB);
    let served = file(&content, How::default());
    let mut raw = Raw::transmit(&served.socket);
    read(&mut raw, 0, MIB);
    let disk = fs::OpenOptions::new().write(true).open(&served.disk).expect("the image");
    disk.set_len(2 * MIB as u64 + 100).expect("cut");
    content[2 * MIB + 100..].fill(0);
    let from = 2 * MIB - (512 << 10);
    assert_same(&read(&mut raw, from, MIB), &content[from..from + MIB]);
    // What had come into the pipe by then is in no other answer.
    assert_same(&read(&mut raw, 4096, 300 << 10), &content[4096..4096 + (300 << 10)]);
    assert_same(&read(&mut raw, 0, MIB), &content[..MIB]);
}

#[test]
fn a_client_that_leaves_in_the_middle_takes_nothing_with_it() {
    let content = dense(8 * MIB);
    let served = file(&content, How::default());
    for turn in 0..30 {
        let mut raw = Raw::transmit(&served.socket);
        for at in 0..12 {
            raw.send(&request(cmd::READ, 0, at, at * 4096, MIB as u32));
        }
        raw.take(16 + turn * 9999);
    }
    let mut raw = Raw::transmit(&served.socket);
    assert_same(&read(&mut raw, 5 * MIB, MIB), &content[5 * MIB..6 * MIB]);
}

#[test]
fn written_pages_are_read_back_by_programs_over_both_kinds_of_sockets() {
    let content = dense(24 * MIB);
    let served = file(&vec![0; content.len()], How::default());
    let (from, to) = (served.dir.path().join("from"), served.dir.path().join("to"));
    fs::write(&from, &content).expect("written");
    run("nbdcopy", &["--request-size=1048576", path(&from), &served.uri()]);
    for uri in [served.uri(), format!("nbd://127.0.0.1:{}/", served.port)] {
        for size in ["262144", "1048576"] {
            let reads = reads_of(&served, || {
                let size = format!("--request-size={size}");
                run("nbdcopy", &["--connections=2", &size, &uri, path(&to)]);
            });
            assert!(reads > content.len() as u64 / size.parse::<u64>().expect("a number"));
            assert_same(&fs::read(&to).expect("the copy"), &content);
        }
    }
}

fn path(path: &std::path::Path) -> &str {
    path.to_str().expect("a plain path")
}
