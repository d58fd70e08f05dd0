//! Requests for the page of metrics, as anybody sends them: each client is answered, with one whole answer.

use bolero::check;
use ringtap_daemon::testing::metrics::answer_to;

/// An answer: its status, and its body.
fn read(answer: &[u8]) -> (u16, &[u8], usize) {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("the end of a head");
    let head = std::str::from_utf8(&answer[..end]).expect("text");
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.1 ")).expect("a status");
    let len = lines.find_map(|line| line.strip_prefix("Content-Length: ")).expect("a length");
    let status = status.get(..3).expect("a number").parse().expect("a number");
    (status, &answer[end + 4..], len.parse().expect("a number"))
}

/// What a request is to be told, of which the whole head has come.
fn wanted(request: &[u8]) -> u16 {
    let line = request.split(|byte| *byte == b'\r').next().expect("one at least");
    let mut words = line.split(|byte| *byte == b' ');
    let (method, target) = (words.next(), words.next().unwrap_or_default());
    let path = target.split(|byte| *byte == b'?').next();
    match (method, path) {
        // Nobody attends to the disks here.
        (Some(b"GET" | b"HEAD"), Some(b"/metrics")) => 503,
        (Some(b"GET" | b"HEAD"), _) => 404,
        _ => 405,
    }
}

#[test]
fn requests_for_metrics() {
    check!().with_max_len(10 << 10).for_each(|input: &[u8]| {
        for request in [input, &[b"GET /metrics", input, b"\r\n\r\n"].concat()] {
            let answer = answer_to(request).expect("an answer");
            let (status, body, len) = read(&answer);
            match request.windows(4).position(|four| four == b"\r\n\r\n") {
                Some(end) if end <= 8 << 10 && status != 400 => {
                    assert_eq!(status, wanted(request));
                }
                // Pieces of a KiB are read: a head that ends with the longest may be taken for longer.
                Some(end) => assert!(status == 400 && end > 7 << 10, "{status} of {end}"),
                None => assert_eq!(status, 400),
            }
            let method = request.split(|byte| b" \r".contains(byte)).next();
            let is_head = method == Some(b"HEAD") && [404, 503].contains(&status);
            assert_eq!(body.len(), if is_head { 0 } else { len });
        }
    });
}
