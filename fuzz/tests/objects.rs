//! What stands beside an image in an object store, and names of objects.

use bolero::check;
use ringtap_objects::index::{CHUNK, Index, digest};
use ringtap_objects::{Uri, boot};

#[test]
fn an_index() {
    check!().for_each(|input: &[u8]| {
        let Ok(index) = Index::parse(input, None) else { return };
        assert_eq!(index.to_bytes(), input);
        assert_eq!(Index::parse(input, Some(digest(input))), Ok(index.clone()));
        let count = index.size().div_ceil(CHUNK) as u32;
        for number in [0, count - 1, count, u32::MAX] {
            let _ = (index.is_zero(number), index.matches(number, input));
        }
    });
}

#[test]
fn an_index_of_many_chunks() {
    check!().with_type::<(u16, Vec<u8>)>().for_each(|(size, digests)| {
        let mut bytes = b"RTIDX\0\0\x01".to_vec();
        bytes.extend((u64::from(*size) << 12).to_le_bytes());
        bytes.extend(CHUNK.to_le_bytes());
        bytes.extend(digests);
        if let Ok(index) = Index::parse(&bytes, None) {
            assert_eq!(index.to_bytes(), bytes);
        }
    });
}

#[test]
fn a_boot_list() {
    check!().for_each(|input: &[u8]| {
        for count in [0, 1, 1000] {
            let text = [&b"ringtap boot list 1, chunks of 256 KiB\n"[..], input].concat();
            if let Ok(numbers) = boot::parse(&text, count) {
                assert!(numbers.len() <= count as usize);
                assert!(numbers.iter().all(|number| *number < count));
            }
            let _ = boot::parse(input, count);
        }
    });
}

#[test]
fn a_name_of_an_object() {
    check!().for_each(|input: &[u8]| {
        let Ok(text) = std::str::from_utf8(input) else { return };
        for scheme in ["", "s3://b/", "https://h/"] {
            let name = format!("{scheme}{text}");
            if let Ok(uri) = Uri::parse(&name) {
                assert!(!uri.key.is_empty() && uri.to_string() == name);
                let _ = uri.identity();
            }
        }
    });
}
