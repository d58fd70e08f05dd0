//! The parent of a differencing VHD: its names, and where it may lie.

use std::path::{Component, Path, PathBuf};

use percent_encoding::percent_decode_str;
use ringtap_io::Io;
use ringtap_stores::percent;

use super::header::{Header, Locator};
use super::{bad, os};
use crate::{Container, OpenError};

/// The longest name that is read.
const LONGEST: u32 = 4096;

/// The names by which the parent may be found, the best first.
pub(super) async fn names(
    io: &Io,
    container: &Container,
    header: &Header,
) -> Result<Vec<PathBuf>, OpenError> {
    let mut names = Vec::new();
    let rank = |locator: &&Locator| match &locator.code {
        b"W2ru" => Some(0),
        b"MacX" => Some(1),
        b"W2ku" => Some(2),
        // Older codes (Wi2r, Wi2k, Mac) hold names that nothing here can mean.
        _ => None,
    };
    let mut locators: Vec<&Locator> =
        header.locators.iter().filter(|locator| rank(locator).is_some()).collect();
    locators.sort_by_key(rank);
    for locator in locators {
        let fits = locator.at.checked_add(u64::from(locator.len));
        if locator.len > LONGEST || fits.is_none_or(|end| end > container.len()) {
            let found = format!("a parent's name of {} bytes at {}", locator.len, locator.at);
            return Err(bad(container, locator.at, found, "a name has at most 4096 bytes"));
        }
        let mut bytes = vec![0; locator.len as usize];
        let failed = |error| os(container, "read the parent's name in", error);
        container.read(io, locator.at, &mut bytes).await.map_err(failed)?;
        names.extend(decode(&locator.code, &bytes));
    }
    if !header.parent_name.is_empty() {
        names.push(from_windows(&header.parent_name));
    }
    names.retain(|name| !name.as_os_str().is_empty());
    Ok(names)
}

fn decode(code: &[u8; 4], bytes: &[u8]) -> Option<PathBuf> {
    if code == b"MacX" {
        let text = String::from_utf8_lossy(bytes);
        let path = text.trim_end_matches('\0').strip_prefix("file://")?;
        let path = path.strip_prefix("localhost").unwrap_or(path);
        return Some(PathBuf::from(&*percent_decode_str(path).decode_utf8_lossy()));
    }
    let units = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes(crate::bytes::get(pair, 0)));
    let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
    Some(from_windows(&String::from_utf16_lossy(&units)))
}

/// `.\dir\disk.vhd` means what it says; of `C:\dir\disk.vhd` only the last part means anything here.
fn from_windows(text: &str) -> PathBuf {
    if text.starts_with('/') {
        return PathBuf::from(text);
    }
    let foreign = text.starts_with("\\\\") || text.get(1..2) == Some(":");
    let text = text.replace('\\', "/");
    match text.rsplit('/').next() {
        Some(last) if foreign => PathBuf::from(last),
        _ => PathBuf::from(text),
    }
}

/// The locators of a new child: what is written where, and its code.
pub(super) fn encoded(parent: &Path, child: &Path) -> Vec<([u8; 4], Vec<u8>)> {
    let folder = |path: &Path| path.parent().unwrap_or(Path::new("/")).to_owned();
    let relative = match parent.strip_prefix(folder(child)) {
        Ok(inside) => inside.to_owned(),
        Err(_) => relative_to(&folder(child), parent),
    };
    let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let relative = relative.to_string_lossy().into_owned();
    let absolute = parent.to_string_lossy().into_owned();
    let url = percent::encoded(&absolute);
    vec![
        (*b"W2ru", utf16(&format!(".\\{}", relative.replace('/', "\\")))),
        (*b"W2ku", utf16(&absolute)),
        (*b"MacX", format!("file://{url}").into_bytes()),
    ]
}

fn relative_to(folder: &Path, path: &Path) -> PathBuf {
    let (from, to): (Vec<_>, Vec<_>) = (folder.components().collect(), path.components().collect());
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = from.iter().skip(common).map(|_| Component::ParentDir);
    up.chain(to.iter().skip(common).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_every_form() {
        let (parent, child) = (Path::new("/a/b/bäse 1.vhd"), Path::new("/a/c/child.vhd"));
        let decoded: Vec<PathBuf> =
            encoded(parent, child).iter().filter_map(|(code, bytes)| decode(code, bytes)).collect();
        let expected = ["./../b/bäse 1.vhd", "/a/b/bäse 1.vhd", "/a/b/bäse 1.vhd"];
        assert_eq!(decoded, expected.map(PathBuf::from));
        assert_eq!(from_windows("C:\\x\\y.vhd"), PathBuf::from("y.vhd"));
        assert_eq!(from_windows("\\\\host\\x\\y.vhd"), PathBuf::from("y.vhd"));
        assert_eq!(decode(b"MacX", b"file:///x%2"), Some(PathBuf::from("/x%2")));
    }
}
