//! What a panic left half changed in memory is written nowhere.

use ringtap_io::{Panic, Tasks};
use ringtap_sim::{Chances, Disk, Sim};

use super::{CreateOptions, Parts, Qcow2, create};
use crate::{Container, Traits};

#[test]
fn nothing_is_written_by_what_a_panic_left_half_changed() {
    for breaks in ["state", "refcounts"] {
        let disk = Disk::new(512);
        let file = disk.add_file(0, 1);
        let (container, look) = (Container::simulated(file, 0, Traits::FILE), disk.clone());
        let all = move || {
            let mut bytes = vec![0; 1 << 20];
            look.peek(file, 0, &mut bytes);
            bytes
        };
        let mut tasks = Tasks::new(Box::new(Sim::new(&disk, 5).chances(Chances::NEVER)));
        let io = tasks.io().clone();
        let work = async move {
            let options = CreateOptions { size: 1 << 30, ..Default::default() };
            let header = create(&io, &container, None, &options).await.expect("made");
            let image =
                Qcow2::open(&io, container, header, Parts::default()).await.expect("opened");
            let room = image.shared.allocate(&io, 0, 65536).await.expect("allocated");
            image.shared.commit(room.expect("room").token, true);
            let before = all();
            let panicked = match breaks {
                "state" => Panic::catch(|| {
                    let mut state = image.shared.state();
                    state.referred.clear();
                    panic!("as the test has it")
                }),
                _ => Panic::catch(|| {
                    let _refcounts = image.shared.refcounts();
                    panic!("as the test has it")
                }),
            };
            let Err(_) = panicked;
            (image, before, all)
        };
        let (image, before, all) = tasks.block_on(work).expect("the simulation runs");
        let io = tasks.io().clone();
        let flushed = Panic::catch(|| tasks.block_on(async move { image.shared.flush(&io).await }));
        assert!(flushed.is_err(), "{breaks}: it looked at what is half changed");
        assert!(all() == before, "{breaks}: it wrote");
    }
}
