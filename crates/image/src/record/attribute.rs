//! Attributes of files.

use std::path::Path;

use ringtap_sandbox::ask;

/// What an attribute says; none where there is none.
pub(super) fn attribute(path: &Path, name: &str) -> Option<String> {
    if ringtap_stores::is_store(path) {
        return None;
    }
    let roots = name.starts_with("trusted.");
    if let Some(asked) = roots.then(|| ask::attribute(path, name)).flatten() {
        return String::from_utf8(asked.ok()?).ok();
    }
    let mut bytes = vec![0; 64];
    loop {
        match rustix::fs::getxattr(path, name, &mut bytes[..]) {
            Ok(len) => return String::from_utf8(bytes.get(..len)?.to_vec()).ok(),
            Err(rustix::io::Errno::RANGE) if bytes.len() < 1 << 16 => {
                bytes.resize(bytes.len() * 4, 0);
            }
            Err(_) => return None,
        }
    }
}
