//! A disk that some may only read, and others write to.

use ringtap_image::{CacheMode, Null};
use ringtap_io::Tasks;
use ringtap_vbd::{Error, Kind, Request, Vbd};

#[test]
fn who_may_only_read_cannot_write_and_others_can() {
    let vbd = Vbd::new(Box::new(Null::new(1 << 20, false)), CacheMode::None);
    let shown = vbd.disk().shown(true, Some(4096));
    assert!(shown.info().read_only && !vbd.info().read_only);
    assert_eq!((shown.info().logical_block_size, vbd.info().logical_block_size), (4096, 512));
    let reader = shown.fork();
    let mut tasks = Tasks::new(ringtap_io::reactor().expect("a reactor"));
    let io = tasks.io().clone();
    let done = tasks.block_on(async move {
        let buffer = io.buffer(4096).expect("memory");
        let zeroes = Kind::WriteZeroes { unmap: true, fast: false };
        for kind in [Kind::Write, Kind::Discard, zeroes, Kind::Read, Kind::Flush] {
            let len = if kind == Kind::Flush { 0 } else { 4096 };
            let request = || Request { kind, offset: 0, len, mem: buffer.mem(), fua: false };
            let reads = matches!(kind, Kind::Read | Kind::Flush);
            let wanted = if reads { Ok(()) } else { Err(Error::ReadOnly) };
            assert_eq!(reader.serve(&io, request()).await, wanted, "{kind:?}");
            assert_eq!(vbd.serve(&io, request()).await, Ok(()), "{kind:?}");
        }
        // What the one writes the other knows of: it is one disk.
        assert_eq!(reader.stats().write.ended, 1);
    });
    done.expect("the ring");
}
