//! The descriptor of a VMDK: a text that names its parts.

use super::common::SECTOR;

/// The most extents of an image.
const MOST_PARTS: usize = 4096;

/// What a descriptor says, as far as it matters here.
#[derive(Debug)]
pub(super) struct Descriptor {
    /// The number that changes with the content.
    pub(super) cid: u32,
    /// How VMware calls its layout.
    pub(super) create_type: String,
    pub(super) parts: Vec<Part>,
}

/// An extent of the disk, in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) len: u64,
    pub(super) kind: PartKind,
    pub(super) name: String,
    /// Where it begins in its file, where that is flat.
    pub(super) offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartKind {
    Flat,
    /// Flat, on a server of VMware's.
    Vmfs,
    Sparse,
    Zero,
}

impl PartKind {
    /// As it stands in descriptors.
    pub(super) fn name(self) -> &'static str {
        match self {
            PartKind::Flat => "FLAT",
            PartKind::Vmfs => "VMFS",
            PartKind::Sparse => "SPARSE",
            PartKind::Zero => "ZERO",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum DescriptorError {
    #[error("no descriptor is there")]
    Absent,
    #[error("it has a parent")]
    Parent,
    #[error("extents of kind {0} are not read here")]
    Kind(String),
    #[error("an extent line is wrong: {0}")]
    Line(String),
    #[error("more than {MOST_PARTS} extents")]
    Many,
}

impl Descriptor {
    pub(super) fn parse(bytes: &[u8]) -> Result<Descriptor, DescriptorError> {
        let bytes = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        let text = String::from_utf8_lossy(bytes);
        if !text.trim_start().starts_with("# Disk DescriptorFile") {
            return Err(DescriptorError::Absent);
        }
        let (mut parts, mut cid, mut create_type) = (Vec::new(), 0, String::new());
        for line in text.lines().map(str::trim) {
            match assignment(line).as_ref().map(|(k, v)| (k.as_str(), *v)) {
                Some(("parentcid", value)) if !value.eq_ignore_ascii_case("ffffffff") => {
                    return Err(DescriptorError::Parent);
                }
                Some(("cid", value)) => cid = u32::from_str_radix(value, 16).unwrap_or(0),
                Some(("createtype", value)) => {
                    // It is shown on terminals.
                    create_type = value.chars().filter(|it| !it.is_control()).take(64).collect();
                }
                _ => {}
            }
            let access = line.split_whitespace().next().unwrap_or_default();
            if ["RW", "RDONLY", "NOACCESS"].contains(&access) {
                parts.push(parse_part(line)?);
            }
            if parts.len() > MOST_PARTS {
                return Err(DescriptorError::Many);
            }
        }
        Ok(Descriptor { cid, create_type, parts })
    }
}

/// `key = value`, the key in small letters, the value without quotes.
fn assignment(line: &str) -> Option<(String, &str)> {
    let (key, value) = line.split_once('=')?;
    Some((key.trim().to_ascii_lowercase(), value.trim().trim_matches('"')))
}

/// `RW 8192 FLAT "name with blanks.vmdk" 0`.
fn parse_part(line: &str) -> Result<Part, DescriptorError> {
    let wrong = || DescriptorError::Line(line.chars().take(200).collect());
    let mut before = line.splitn(2, '"');
    let mut words = before.next().unwrap_or_default().split_whitespace().skip(1);
    let len = words.next().and_then(|word| word.parse::<u64>().ok()).ok_or_else(wrong)?;
    let kind = words.next().ok_or_else(wrong)?;
    let (name, after) = before.next().and_then(|rest| rest.split_once('"')).unwrap_or_default();
    let offset = match after.split_whitespace().next() {
        Some(word) => word.parse::<u64>().map_err(|_| wrong())?,
        None => 0,
    };
    let kind = match kind {
        "FLAT" => PartKind::Flat,
        "VMFS" => PartKind::Vmfs,
        "SPARSE" => PartKind::Sparse,
        "ZERO" => PartKind::Zero,
        other => return Err(DescriptorError::Kind(other.chars().take(40).collect())),
    };
    if (name.is_empty() && kind != PartKind::Zero) || len == 0 {
        return Err(wrong());
    }
    let bytes = |sectors: u64| sectors.checked_mul(SECTOR).ok_or_else(wrong);
    Ok(Part { len: bytes(len)?, kind, name: name.to_owned(), offset: bytes(offset)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_of_every_kind() {
        let text = "# Disk DescriptorFile\nversion=1\nparentCID=ffffffff\ncreateType=\"x\"\n\
                    RW 100 FLAT \"a b.vmdk\" 5\nRW 7 SPARSE \"c.vmdk\"\nRW 3 ZERO\n";
        let descriptor = Descriptor::parse(text.as_bytes()).expect("a descriptor");
        let part =
            |len, kind, name: &str, offset| Part { len, kind, name: name.to_owned(), offset };
        let expected = [
            part(51200, PartKind::Flat, "a b.vmdk", 2560),
            part(3584, PartKind::Sparse, "c.vmdk", 0),
            part(1536, PartKind::Zero, "", 0),
        ];
        assert_eq!(descriptor.parts, expected);
        for wrong in ["RW x FLAT \"a\" 0", "RW 1 FLAT", "RW 1 SESPARSE \"a\"", "parentCID=12345678"]
        {
            let text = format!("# Disk DescriptorFile\n{wrong}\n");
            assert!(Descriptor::parse(text.as_bytes()).is_err(), "{wrong}");
        }
        assert!(Descriptor::parse(b"RW 1 ZERO").is_err());
    }
}
