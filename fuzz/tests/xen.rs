//! Rings of arbitrary bytes: whatever a frontend writes into its own pages, the back end ends each
//! request or the ring, touches nothing else, and is over at once.
//!
//! The input: one byte of flags (the layout, and whether pages are kept mapped), how many requests
//! are put, the requests one after the other, then the bytes of granted pages.

use bolero::{TypeGenerator, check};
use ringtap_export::xen::testing::{Abi, Answer, Backend, Frontend, PLACES};

const PAGE: usize = 4096;

fn answers_are_sound(answers: &[Answer], put: u32) {
    assert!(answers.len() <= put as usize);
    assert!(answers.iter().all(|answer| (-2..=0).contains(&answer.status)));
}

#[test]
fn xen_ring_of_bytes() {
    check!().with_iterations(300).for_each(|input: &[u8]| {
        let [flags, count, rest @ ..] = input else { return };
        let (abi, entry) = if flags & 1 == 0 { (Abi::Wide, 112) } else { (Abi::X86_32, 108) };
        let mut front = Frontend::new(abi).expect("memory");
        let kept = if flags & 2 == 0 { 0 } else { 40 };
        let mut back = Backend::on_nothing(&front, kept).expect("a ring");
        let count = u32::from(*count) % (PLACES + 1);
        let (requests, pages) = rest.split_at(rest.len().min(count as usize * entry));
        front.scribble(PAGE / 4, pages);
        for request in requests.chunks(entry) {
            front.put(request);
        }
        back.serve().expect("no more was put than fits");
        let put = requests.len().div_ceil(entry) as u32;
        let answers = front.take();
        answers_are_sound(&answers, put);
        assert_eq!(answers.len(), put as usize, "each is answered, once");
    });
}

/// A request that is nearly right.
#[derive(Debug, TypeGenerator)]
struct Ask {
    #[generator(0..8)]
    operation: u8,
    second: u8,
    third: u16,
    id: u64,
    /// Near the start of the disk, mostly.
    far: bool,
    sector: u64,
    segments: [(u8, u8, u8); 11],
}

impl Ask {
    fn bytes(&self) -> Vec<u8> {
        // Counts that are taken, mostly.
        let second = if self.second > 100 { self.second } else { self.second % 13 };
        let mut bytes = vec![self.operation, second];
        bytes.extend(self.third.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.id.to_le_bytes());
        let sector = if self.far { self.sector } else { self.sector % 4096 };
        bytes.extend(sector.to_le_bytes());
        for (grant, first, last) in self.segments {
            bytes.extend(u32::from(grant % 80).to_le_bytes());
            bytes.extend([first % 9, last % 9, 0, 0]);
        }
        bytes
    }
}

#[test]
fn xen_ring_of_requests() {
    check!().with_iterations(300).with_type::<(bool, Vec<Ask>, Vec<u8>)>().for_each(
        |(kept, asks, pages)| {
            let mut front = Frontend::new(Abi::Wide).expect("memory");
            let kept = if *kept { 40 } else { 0 };
            let mut back = Backend::on_nothing(&front, kept).expect("a ring");
            front.scribble(PAGE / 4, pages);
            for round in asks.chunks(PLACES as usize) {
                round.iter().for_each(|ask| front.put(&ask.bytes()));
                back.serve().expect("no more was put than fits");
                let answers = front.take();
                answers_are_sound(&answers, round.len() as u32);
                assert_eq!(answers.len(), round.len());
                let mut wanted: Vec<u64> = round.iter().map(|ask| ask.id).collect();
                let mut found: Vec<u64> = answers.iter().map(|answer| answer.id).collect();
                wanted.sort_unstable();
                found.sort_unstable();
                assert_eq!(found, wanted);
            }
        },
    );
}
