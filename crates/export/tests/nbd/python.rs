//! Scripts for libnbd's Python bindings, in the files beside this one.

use std::fs;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringtap_image::{Boxed, Discard, Error, Extent, Image, Info, Status};
use ringtap_io::{Io, OpenFile};

use crate::harness::{How, Served, direct, file, image, pattern, run, sparse};

fn script(name: &str, text: &str, served: &Served, more: &[&str]) {
    let path = served.dir.path().join(name);
    fs::write(&path, text).expect("written");
    let (path, socket) = (path.to_str().expect("UTF-8"), served.socket.to_str().expect("UTF-8"));
    // Debian's own Python has libnbd's bindings; others may not.
    let args = [&[path, socket], more].concat();
    run("/usr/bin/python3", &args);
}

#[test]
fn features() {
    for how in [How::default(), direct()] {
        let served = sparse(64 << 20, how);
        script("features.py", include_str!("features.py"), &served, &[]);
        let stats = served.vbd.stats();
        assert!(stats.flush.ended >= 1 && stats.discard.ended >= 1, "{stats:?}");
        assert!(stats.write_zeroes.ended >= 2, "{stats:?}");
    }
}

#[test]
fn unaligned_requests_against_a_model() {
    for how in [How::default(), direct()] {
        let content = pattern(1 << 20, 3);
        let served = file(&content, how);
        let copy = served.dir.path().join("copy");
        fs::write(&copy, &content).expect("written");
        script(
            "unaligned.py",
            include_str!("unaligned.py"),
            &served,
            &[copy.to_str().expect("UTF-8")],
        );
    }
}

#[test]
fn errors_are_the_right_ones() {
    let served = sparse(1 << 20, direct());
    script("errors.py", include_str!("errors.py"), &served, &[]);
}

#[test]
fn a_read_only_export_refuses_writes() {
    let served = file(&[9; 65536], How { read_only: true, ..How::default() });
    script("read_only.py", include_str!("read_only.py"), &served, &[]);
    assert_eq!(served.content(), [9; 65536]);
}

/// An image whose bytes are those of some special file.
#[derive(Clone)]
struct Special {
    file: Arc<OpenFile>,
    info: Info,
}

impl Image for Special {
    fn info(&self) -> &Info {
        &self.info
    }

    fn fork(&self) -> Box<dyn Image> {
        Box::new(self.clone())
    }

    fn map(&self, offset: u64, len: u64) -> Extent<'_> {
        Extent::Data { file: self.file.handle(), offset, len, writable: true, cipher: None }
    }

    fn flush<'a>(&'a self, _: &'a Io) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::Os(libc::EIO)) })
    }

    fn discard<'a>(
        &'a self,
        _: &'a Io,
        _: u64,
        _: u64,
        _: Discard,
    ) -> Boxed<'a, Result<(), Error>> {
        Box::pin(async { Err(Error::Unsupported) })
    }

    fn status<'a>(&'a self, _: &'a Io, _: u64, _: u64) -> Boxed<'a, Result<Status, Error>> {
        Box::pin(async { Err(Error::Os(libc::EIO)) })
    }

    fn current_size(&self) -> Result<u64, Error> {
        Ok(self.info.size)
    }
}

fn special(path: &str, write: bool) -> Served {
    let file = fs::File::options().read(!write).write(write).open(path).expect("it opens");
    let info = Info {
        format: "special",
        size: 1 << 20,
        read_only: false,
        request_alignment: 1,
        memory_alignment: 1,
        discard_alignment: 1,
        logical_block_size: 512,
        physical_block_size: 4096,
        discard: true,
        fast_zero: false,
        rotational: false,
    };
    let file = Arc::new(OpenFile::new(OwnedFd::from(file)));
    image(Box::new(Special { file, info }), How::default())
}

#[test]
fn a_full_disk_and_a_broken_one() {
    // /dev/full has no room for any write, and is opened here so that it cannot be read either.
    let served = special("/dev/full", true);
    script("broken.py", include_str!("broken.py"), &served, &["ENOSPC"]);
    // A file opened only to be read fails every write with something that is not the client's fault.
    let served = special("/dev/zero", false);
    script("broken.py", include_str!("broken.py"), &served, &["EIO"]);
}
