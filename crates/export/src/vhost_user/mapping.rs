//! Files of a front-end, mapped: guarded against being cut short, and counted.
//!
//! The kernel lets a process have so many mappings (vm.max_map_count) and then refuses every one, threads and
//! buffers of other disks too. So each connection has a limit of its own, and all of them together leave a part
//! to the rest of the process. Each server keeps [`OWN`] for the guest it will have, whatever others take.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::truncated::Guard;

/// Mappings that one connection may have: 509 regions, a table of 32 that replaces another, and the inflight
/// buffers of its queues.
pub(crate) const MOST: usize = 640;
/// Mappings that are kept for each server.
const OWN: usize = 48;
/// Bytes that one connection may have mapped, all connections together beyond what is kept for them, and what that
/// is for each server: a process has 128 TiB of addresses.
const MOST_BYTES: u64 = 16 << 40;
const COMMON_BYTES: u64 = 64 << 40;
const OWN_BYTES: u64 = 64 << 30;
/// What the kernel allows where /proc/sys does not say.
const USUAL_LIMIT: usize = 65_530;

struct Process {
    servers: usize,
    /// Mappings of connections past what was kept for them.
    common: usize,
    /// Bytes of connections past what was kept for them.
    common_bytes: u64,
    /// vm.max_map_count.
    limit: usize,
}

static PROCESS: Mutex<Process> =
    Mutex::new(Process { servers: 0, common: 0, common_bytes: 0, limit: 0 });

impl Process {
    /// What connections may take beyond their own.
    fn most_common(&self) -> usize {
        (self.limit / 4 * 3).saturating_sub(self.servers * OWN)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it lives, mappings are kept for a server.
#[derive(Debug)]
pub(crate) struct Kept(());

impl Kept {
    pub(crate) fn new() -> Kept {
        locked(&PROCESS).servers += 1;
        Kept(())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        locked(&PROCESS).servers -= 1;
    }
}

/// Why a mapping was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the front-end has {MOST} files mapped, and one more is not mapped for it")]
    Connection,
    #[error(
        "vm.max_map_count is {limit}, and front-ends have taken the {taken} mappings of it that are not kept \
         for others: raise it (sysctl vm.max_map_count), or serve fewer disks in one process"
    )]
    Process { limit: usize, taken: usize },
    #[error(
        "the front-end has {had} bytes mapped, and {len} more are not mapped for it: it may have {MOST_BYTES}"
    )]
    ConnectionBytes { had: u64, len: u64 },
    #[error("front-ends have taken all the addresses that are not kept for others: {taken} bytes")]
    ProcessBytes { taken: u64 },
    #[error("{len} bytes at {offset} are to be mapped of a file of {size} bytes")]
    Range { offset: u64, len: u64, size: u64 },
    #[error("cannot map {len} bytes at {offset} of the front-end's file: {source}")]
    Os { offset: u64, len: u64, source: io::Error },
}

/// The mappings of one connection.
#[derive(Clone)]
pub(crate) struct Maps {
    has: Arc<Mutex<Has>>,
    process: &'static Mutex<Process>,
}

/// What a connection has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Has {
    count: usize,
    bytes: u64,
}

impl Has {
    /// What of it is beyond what is kept for it.
    fn beyond(self) -> Has {
        Has { count: self.count.saturating_sub(OWN), bytes: self.bytes.saturating_sub(OWN_BYTES) }
    }
}

impl Default for Maps {
    fn default() -> Maps {
        Maps { has: Arc::default(), process: &PROCESS }
    }
}

impl Maps {
    fn take(&self, len: u64) -> Result<Counted, Error> {
        let mut has = locked(&self.has);
        if has.count >= MOST {
            return Err(Error::Connection);
        }
        let next = Has { count: has.count + 1, bytes: has.bytes.saturating_add(len) };
        if next.bytes > MOST_BYTES {
            return Err(Error::ConnectionBytes { had: has.bytes, len });
        }
        let (before, after) = (has.beyond(), next.beyond());
        if before != after {
            let mut process = locked(self.process);
            process.limit = limit();
            let common = process.common + after.count - before.count;
            let bytes = process.common_bytes + after.bytes - before.bytes;
            if common > process.common && common > process.most_common() {
                return Err(Error::Process { limit: process.limit, taken: process.common });
            }
            if bytes > process.common_bytes && bytes > COMMON_BYTES {
                return Err(Error::ProcessBytes { taken: process.common_bytes });
            }
            (process.common, process.common_bytes) = (common, bytes);
        }
        *has = next;
        Ok(Counted(self.clone(), len))
    }
}

fn limit() -> usize {
    let told = std::fs::read_to_string("/proc/sys/vm/max_map_count");
    told.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(USUAL_LIMIT)
}

/// One of them, of so many bytes.
struct Counted(Maps, u64);

impl Drop for Counted {
    fn drop(&mut self) {
        let mut has = locked(&self.0.has);
        let before = has.beyond();
        *has = Has { count: has.count - 1, bytes: has.bytes - self.1 };
        let after = has.beyond();
        let mut process = locked(self.0.process);
        process.common -= before.count - after.count;
        process.common_bytes -= before.bytes - after.bytes;
    }
}

/// A mapping that no connection has, as of pages that a guest of Xen grants: it counts with what all connections take beyond their own.
pub(crate) struct Other(&'static Mutex<Process>);

impl Other {
    pub(crate) fn take() -> Result<Other, Error> {
        Other::of(&PROCESS)
    }

    fn of(all: &'static Mutex<Process>) -> Result<Other, Error> {
        let mut process = locked(all);
        process.limit = limit();
        if process.common >= process.most_common() {
            return Err(Error::Process { limit: process.limit, taken: process.common });
        }
        process.common += 1;
        Ok(Other(all))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        locked(self.0).common -= 1;
    }
}

/// Memory of a front-end's file, shared with it. The file's descriptor is not kept.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// What the kernel has mapped for it: whole pages, and of hugetlbfs whole large ones.
    mapped: usize,
    guard: Option<Guard>,
    counted: Option<Counted>,
}

// SAFETY: the mapping belongs to no thread; what is in it is a guest's, and only reached by raw pointers
// and atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// The type of hugetlbfs (include/uapi/linux/magic.h).
const HUGETLBFS: i64 = 0x9584_58f6;

/// The pages that a file is mapped by, of which the kernel neither maps, unmaps nor replaces a part. `block` is what
/// the file says that it is best read by, which is such a page there.
fn page_of(file: &File, block: u64) -> io::Result<u64> {
    let usual = ringtap_io::PAGE as u64;
    // No other is asked: a file system of a front-end's own may not answer.
    if block <= usual || !block.is_power_of_two() || rustix::fs::fcntl_get_seals(file).is_err() {
        return Ok(usual);
    }
    let found = rustix::fs::fstatfs(file)?;
    Ok(if found.f_type as i64 == HUGETLBFS { block } else { usual })
}

impl Mapping {
    /// Map `len` bytes at `offset`, which the file must reach.
    pub(crate) fn new(file: &File, offset: u64, len: u64, maps: &Maps) -> Result<Mapping, Error> {
        let os = |source| Error::Os { offset, len, source };
        let facts = file.metadata().map_err(os)?;
        let size = facts.len();
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::Range { offset, len, size });
        }
        let page = page_of(file, facts.blksize()).map_err(os)?;
        let too_long = || os(io::ErrorKind::OutOfMemory.into());
        let mapped = len.checked_next_multiple_of(page).ok_or_else(too_long)?;
        let counted = maps.take(mapped)?;
        let bytes = usize::try_from(len).map_err(|_| too_long())?;
        let mapped = usize::try_from(mapped).map_err(|_| too_long())?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe { mmap(ptr::null_mut(), bytes, protection, flags, file, offset) };
        let base = base.map_err(|error| os(error.into()))?;
        let base = NonNull::new(base.cast()).ok_or_else(too_long)?;
        let counted = Some(counted);
        let mut mapping = Mapping { base, len: bytes, mapped, guard: None, counted };
        mapping.guard = Some(Guard::new(mapping.base(), mapped).map_err(os)?);
        Ok(mapping)
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether its front-end cut the file short, and somebody here looked behind its end.
    pub(crate) fn is_cut(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_cut)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Nothing may be put in the place of what is no mapping of ours any more.
        self.guard = None;
        // SAFETY: exactly the mapping that `new` made, and nobody uses it any more.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.mapped) } {
            // It is there still, and counts.
            std::mem::forget(self.counted.take());
            tracing::warn!("cannot unmap {} bytes of a front-end's file: {error}", self.mapped);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn a_connection_has_a_limit_and_gives_back() {
        let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).expect("memfd"));
        ftruncate(&file, 4096).expect("its size");
        let map = |maps: &Maps| Mapping::new(&file, 0, 4096, maps);
        let (maps, others) = (Maps::default(), Maps::default());
        let all: Vec<_> = (0..MOST).map(|_| map(&maps).expect("a mapping")).collect();
        assert!(matches!(map(&maps), Err(Error::Connection)));
        map(&others).expect("its own");
        drop(all);
        assert_eq!(*locked(&maps.has), Has::default());
        map(&maps).expect("there is room again");
    }

    /// Whether there are pages for it or not: without any, whoever touches it is sent SIGBUS.
    #[test]
    fn a_piece_of_a_large_page_is_guarded_and_unmapped_as_a_whole() {
        const NAME: &str = "a-piece-of-a-large-page";
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
        let file = match memfd_create(NAME, flags) {
            Ok(file) => File::from(file),
            Err(error) => return eprintln!("no large pages here: {error}"),
        };
        let large = file.metadata().expect("its facts").blksize();
        ftruncate(&file, large).expect("its size");
        let maps = Maps::default();
        for _ in 0..3 {
            let mapping = Mapping::new(&file, 0, 4096, &maps).expect("a mapping");
            assert_eq!(mapping.len(), 4096);
            assert_eq!(*locked(&maps.has), Has { count: 1, bytes: large });
            // SAFETY: the first byte of a mapping that may be read, whose guard answers for its pages.
            unsafe { mapping.base().read_volatile() };
            drop(mapping);
            assert_eq!(*locked(&maps.has), Has::default());
            let all = std::fs::read_to_string("/proc/self/maps").expect("the maps");
            assert!(!all.contains(NAME), "{all}");
        }
    }

    /// What is not unmapped counts as long as the connection lasts.
    #[test]
    fn what_cannot_be_unmapped_is_counted_still() {
        let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).expect("memfd"));
        ftruncate(&file, 4096).expect("its size");
        let maps = Maps::default();
        let mut mapping = Mapping::new(&file, 0, 4096, &maps).expect("a mapping");
        let whole = std::mem::take(&mut mapping.mapped);
        let base = mapping.base;
        drop(mapping);
        assert_eq!(*locked(&maps.has), Has { count: 1, bytes: 4096 });
        // SAFETY: the mapping made above, which nobody uses.
        unsafe { munmap(base.as_ptr().cast(), whole) }.expect("unmapped");
    }

    #[test]
    fn what_is_kept_for_a_server_is_not_taken_by_others() {
        let most =
            |servers, limit| Process { servers, common: 0, common_bytes: 0, limit }.most_common();
        assert_eq!(most(0, 65_536), 49_152);
        assert_eq!(most(32, 65_536), 49_152 - 32 * OWN);
        assert_eq!(most(2000, 65_536), 0, "each has its own, and no more");
        // Grants of a guest of Xen are taken of the same.
        let common = limit() / 4 * 3 - OWN - 2;
        let process = Process { servers: 1, common, common_bytes: 0, limit: 0 };
        let process: &'static Mutex<Process> = Box::leak(Box::new(Mutex::new(process)));
        let both = [Other::of(process), Other::of(process)].map(|one| one.expect("room"));
        let text = Other::of(process).map(drop).expect_err("no more").to_string();
        assert!(text.contains("vm.max_map_count"), "{text}");
        drop(both);
        assert_eq!(locked(process).common, common);
        // As all that may be taken is taken.
        let common = limit() / 4 * 3 - OWN;
        let process = Process { servers: 1, common, common_bytes: 0, limit: 0 };
        let process: &'static Mutex<Process> = Box::leak(Box::new(Mutex::new(process)));
        let maps = Maps { process, ..Maps::default() };
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4096).expect("its size");
        let map = || Mapping::new(&file, 0, 4096, &maps);
        let mut own: Vec<_> = (0..OWN).map(|_| map().expect("its own")).collect();
        let text = map().map(drop).expect_err("no more").to_string();
        assert!(text.contains("vm.max_map_count"), "{text}");
        own.pop();
        own.push(map().expect("one went, and one comes"));
        // Another gives one back.
        locked(process).common -= 1;
        own.push(map().expect("there is room"));
        assert!(map().is_err());
        drop(own);
        assert_eq!(*locked(&maps.has), Has::default());
        assert_eq!(locked(process).common, common - 1);
    }

    #[test]
    fn a_file_that_is_too_short_is_not_mapped() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(8192).expect("its size");
        let maps = Maps::default();
        for (offset, len) in [(0, 0), (0, 8193), (8192, 1), (u64::MAX, 2), (4096, u64::MAX)] {
            let end = Mapping::new(&file, offset, len, &maps);
            assert!(matches!(end, Err(Error::Range { .. })), "{len} at {offset}");
        }
        let end = Mapping::new(&file, 1, 4096, &maps);
        assert!(matches!(end, Err(Error::Os { .. })), "not at a page");
        assert_eq!(*locked(&maps.has), Has::default());
    }

    #[test]
    fn no_front_end_takes_all_addresses() {
        let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).expect("memfd"));
        ftruncate(&file, MOST_BYTES + 4096).expect("its size");
        let process = Process { servers: 5, common: 0, common_bytes: 0, limit: 0 };
        let process: &'static Mutex<Process> = Box::leak(Box::new(Mutex::new(process)));
        let connect = || Maps { process, ..Maps::default() };
        let first = connect();
        let end = Mapping::new(&file, 0, MOST_BYTES + 4096, &first).map(drop);
        assert!(matches!(end, Err(Error::ConnectionBytes { had: 0, .. })), "{end:?}");
        let map = |maps: &Maps| Mapping::new(&file, 0, MOST_BYTES, maps);
        let all: Vec<_> = (0..4).map(|_| map(&connect()).expect("a large guest")).collect();
        // Each of the four has what is kept for it besides.
        let fifth = connect();
        let end = map(&fifth).map(drop);
        assert!(matches!(end, Err(Error::ProcessBytes { .. })), "{end:?}");
        Mapping::new(&file, 0, OWN_BYTES, &fifth).expect("its own");
        drop(all);
        assert_eq!(locked(process).common_bytes, 0);
        map(&fifth).expect("there is room again");
    }
}
