//! Descriptor chains of arbitrary bytes: whatever a guest puts into its ring, nothing outside its
//! memory is touched, and it is over at once.
//!
//! The input: the queue's size as a power of two, how many chains are available, their heads (two
//! bytes each), then guest memory from its beginning, which is the descriptor table.

use ringtap_export::vhost_user::testing::{GuestRing, Outcome};

#[test]
fn descriptors() {
    bolero::check!().for_each(|input: &[u8]| {
        let [size, count, rest @ ..] = input else { return };
        let (heads, memory) = rest.split_at(rest.len().min(usize::from(*count % 64) * 2));
        let heads: Vec<u16> =
            heads.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        let mut ring = GuestRing::new(memory, 1 << (size % 11), &heads);
        for _ in 0..=heads.len() {
            if matches!(ring.serve_one(), Outcome::Nothing | Outcome::Broken(_)) {
                break;
            }
        }
    });
}
