use ringtap_io::Tasks;
use ringtap_sim::{Chances, Disk, Sim};

use super::*;
use crate::Traits;
use crate::qcow2::{CreateOptions, create, create_snapshot};

/// With memory for few clusters at a time, all rounds together find and repair the same.
#[test]
fn rounds_of_little_memory_find_the_same() {
    let disk = Disk::new(512);
    let file = disk.add_file(0, 1);
    let container = Container::simulated(file, 0, Traits::FILE);
    let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 5).chances(Chances::NEVER)));
    let io = tasks.io().clone();
    let work = async move {
        let mut options = CreateOptions { size: 3 << 20, ..CreateOptions::default() };
        options.set("cluster_size", "512").expect("set");
        options.set("preallocation", "metadata").expect("set");
        options.set("refcount_bits", "8").expect("set");
        let header = create(&io, &container, None, &options).await.expect("made");
        create_snapshot(&io, &container, "one", (0, 0)).await.expect("made");
        let header = Header::read(&io, &container).await.map(|new| (new, header)).expect("read").0;
        // Refcounts too low and too high, in blocks far apart.
        let mut entry = [0; 8];
        let at = header.refcount_table_offset;
        for (block, value) in [(1, 0), (5, 7), (12, 0)] {
            container.read(&io, at + block * 8, &mut entry).await.expect("read");
            let block = u64::from_be_bytes(entry);
            container.write(&io, block + 100, &[value; 20]).await.expect("written");
        }
        let all = check(&io, &container, Repair::Nothing).await.expect("checked");
        // Four pages of counts are 256 clusters; the image has more than twenty times that.
        let rounds = check_within(&io, &container, Repair::Nothing, 1248).await.expect("checked");
        assert!(all.leaks >= 20 && all.corruptions >= 40, "{all:?}");
        assert_eq!((all.leaks, all.corruptions), (rounds.leaks, rounds.corruptions));
        assert_eq!(
            (all.image_end, all.allocated_clusters),
            (rounds.image_end, rounds.allocated_clusters)
        );
        let repaired = check_within(&io, &container, Repair::All, 1248).await.expect("repaired");
        assert!(repaired.is_clean(), "{repaired:?}");
        let report = check(&io, &container, Repair::Nothing).await.expect("checked");
        assert!(report.is_clean(), "{report:?}");
    };
    tasks.block_on(work).expect("the simulation runs");
}
