use super::*;

fn whole(rng: &mut fastrand::Rng) -> Whole {
    let bitmap = |id| KeptBitmap {
        name: format!("bitmap {id}"),
        granularity: 1 << 16,
        id,
        recording: id % 2 == 0,
        lost: id == 2,
    };
    let bitmaps: Vec<KeptBitmap> = (0..rng.u64(0..4)).map(bitmap).collect();
    let mut page = || (rng.u64(0..50), (0..PAGE_WORDS).map(|_| rng.u64(..)).collect());
    let pages = bitmaps.iter().map(|one| (0..one.id).map(|_| page()).collect()).collect();
    let meta = Meta {
        identity: "file 7".into(),
        boot: "b".into(),
        session: 5,
        region: 1 << 26,
        known: layout::Known { modified: Some(9), written: None },
        data: None,
        closed: false,
        next: None,
        part: None,
        bitmaps,
    };
    Whole { meta, pages }
}

#[test]
fn a_whole_reads_as_it_was_written_and_none_that_is_damaged() {
    let mut rng = fastrand::Rng::with_seed(1);
    for _ in 0..50 {
        let whole = whole(&mut rng);
        let mut bytes = whole.encode();
        let header = Header::new(7, &(FIRST..FIRST + 4096), &(16384..20000), &bytes);
        let back = Whole::decode(&bytes).expect("a whole");
        assert_eq!((back.meta.bitmaps, back.pages), (whole.meta.bitmaps, whole.pages));
        assert!(header.is_of(&bytes));
        let mut head = header.encode();
        assert_eq!(Header::decode(&head), Some(header.clone()));
        let at = rng.usize(0..head.len());
        head[at] ^= 1 << rng.u8(0..8);
        assert_eq!(Header::decode(&head), None);
        let at = rng.usize(0..bytes.len());
        bytes[at] ^= 1 << rng.u8(0..8);
        assert!(!header.is_of(&bytes));
        // What is hashed may still be nonsense.
        let _any = Whole::decode(&bytes[..rng.usize(0..bytes.len())]);
    }
}

#[test]
fn the_next_whole_never_lies_where_one_does_that_may_be_needed() {
    let mut rng = fastrand::Rng::with_seed(2);
    let mut kept: Vec<Slot> = vec![];
    let mut furthest = 0;
    for _ in 0..1000 {
        let (regions, bytes) = (4096 * rng.u64(1..4), rng.u64(1..100_000));
        let start = place(&kept, regions + bytes);
        let slot =
            Slot { log: start..start + regions, body: start + regions..start + regions + bytes };
        for before in &kept {
            assert!(slot.body.end <= before.log.start || slot.log.start >= before.body.end);
        }
        assert!(slot.log.start >= FIRST);
        furthest = furthest.max(slot.body.end);
        // The present one alone, or the one before it as well.
        if kept.len() > 1 || rng.bool() {
            kept.clear();
        }
        kept.push(slot);
    }
    assert!(furthest < 1_000_000, "{furthest}");
}

/// Of a log that is said to be larger than the file it would take as much memory.
#[test]
fn a_log_behind_the_end_of_its_file_is_none() {
    let disk = ringtap_sim::Disk::new(512);
    let file = disk.add_file(0, 1);
    let body = whole(&mut fastrand::Rng::with_seed(3)).encode();
    let places = FIRST..FIRST + body.len() as u64;
    disk.poke(file, places.start, &body);
    let found = |log: Range<u64>| {
        let header = Header::new(1, &log, &places, &body);
        disk.poke(file, HEADERS[0], &header.encode());
        let sidecar = Container::simulated(file, disk.size(file), crate::Traits::FILE);
        ringtap_sim::alone(&disk, 1, async move |io| find(&io, &sidecar).await)
    };
    assert!(found(places.clone()).expect("read").is_some());
    assert!(found(FIRST..FIRST + (3 << 30)).expect("read").is_none());
}
