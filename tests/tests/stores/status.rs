//! What a server says of its blocks, to the export's end.

use ringtap_tests::ok;

use crate::bench::{Bench, said};

#[test]
fn an_export_of_any_size_is_looked_at_to_its_end() {
    let bench = Bench::new();
    let size = 3_146_505;
    bench.raw("a.raw", size);
    let image = bench.text("a.raw");
    ok("qemu-io", "qemu-utils", &["-f", "raw", "-c", "write -P 7 1M 1M", &image]);
    // The image has whole sectors now.
    let file = std::fs::File::options().write(true).open(&image).expect("the image");
    file.set_len(size).expect("cut");
    let _source = bench.nbdkit(&["file", &image]);
    let uri = bench.uri();
    let map = said(&["map", "-f", "raw", "--output", "json", &uri]);
    assert!(map.contains("\"length\": 1048576") || map.contains("\"length\":1048576"), "{map}");
    let copy = bench.text("copy");
    said(&["convert", "-q", "-f", "raw", "-O", "raw", &uri, &copy]);
    said(&["compare", "-f", "raw", "-F", "raw", &uri, &copy]);
    let (was, is) = (std::fs::read(&image).expect("it"), std::fs::read(&copy).expect("it"));
    assert!(is[..was.len()] == was[..] && is[was.len()..].iter().all(|byte| *byte == 0));
}
