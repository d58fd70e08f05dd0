//! What stands in the files beside records, as it would be written again: for fuzz targets.

use super::layout::Whole;
use super::sidecar::{parse, text_of};

/// The body of a sidecar; none where it is none.
pub fn body_again(bytes: &[u8]) -> Option<Vec<u8>> {
    Whole::decode(bytes).map(|whole| whole.encode())
}

/// The file that says where an image's disk may come from; none where it is none.
pub fn coming_again(bytes: &[u8]) -> Option<Vec<u8>> {
    parse(bytes).map(|(name, image)| text_of(&name, &image))
}
