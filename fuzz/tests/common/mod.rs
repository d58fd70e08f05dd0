//! What targets of images share.

use ringtap_image::{CacheMode, Image};
use ringtap_io::{Io, Tasks};
use ringtap_sim::{Chances, Disk, Sim};
use ringtap_vbd::{Kind, Request, Vbd};

/// Run one task to its end on a disk on which nothing fails.
pub fn run<T: 'static, F: Future<Output = T> + 'static>(
    disk: &Disk,
    task: impl FnOnce(Io) -> F,
) -> T {
    let mut tasks = Tasks::new(Box::new(Sim::new(disk, 1).chances(Chances::NEVER)));
    let io = tasks.io().clone();
    tasks.block_on(task(io)).expect("the simulation runs")
}

/// Whether what is written reads back.
#[derive(Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "each program of this folder uses one of them")]
pub enum Writes {
    ReadBack,
    /// Two clusters may be led to one place, so that one is written over by the other.
    MayCross,
}

/// Read here and there, and write where that is allowed.
pub async fn use_image(io: &Io, image: Box<dyn Image>, writes: Writes) {
    let vbd = Vbd::new(image, CacheMode::None);
    let (size, writable) = (vbd.size(), !vbd.info().read_only);
    let mut buffer = io.buffer(64 << 10).expect("memory");
    let offsets = [0, size / 3, size / 2, size.saturating_sub(4096)];
    for offset in offsets.map(|offset| offset / 512 * 512) {
        let len = (size - offset).min(64 << 10);
        let mem = buffer.mem().window(0, len as usize);
        let ask = |kind| Request { kind, offset, len, mem, fua: false };
        // Errors are answers too.
        let _answer = vbd.serve(io, ask(Kind::Read)).await;
        let _answer = vbd.status(io, offset, len).await;
        if writable {
            buffer.bytes_mut().fill(7);
            let written = vbd.serve(io, ask(Kind::Write)).await;
            let zeroes = ask(Kind::WriteZeroes { unmap: true, fast: false });
            let _answer = vbd.serve(io, Request { len: 512, ..zeroes }).await;
            if written.is_ok() && len > 512 {
                let mut back = io.buffer(len as usize).expect("memory");
                back.bytes_mut().fill(1);
                vbd.serve(io, Request { mem: back.mem(), ..ask(Kind::Read) }).await.expect("read");
                let same = back.bytes()[512..].iter().all(|byte| *byte == 7);
                assert!(same || writes == Writes::MayCross, "a write reads back");
            }
        }
    }
    let _answer = vbd.close(io).await;
}
