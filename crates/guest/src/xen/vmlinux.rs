//! The ELF file within a compressed kernel. Xen could decompress it itself, but takes six seconds
//! for it under TCG, and every `xl create` as long again.
//!
//! The layout of a bzImage is told in Linux's Documentation/arch/x86/boot.rst.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use crate::apt;
use crate::error::{Error, Result, io};

/// Where the header says how many sectors of 512 bytes come before the protected-mode code.
const SETUP_SECTORS: usize = 0x1f1;
const MAGIC: usize = 0x202;
/// Offset and length of the compressed kernel within the protected-mode code, 32 bits each.
const PAYLOAD: usize = 0x248;

/// The kernel `image` as an ELF file in `store`, made there unless it is.
pub(crate) fn uncompressed(image: &Path, store: &Path) -> Result<PathBuf> {
    let _lock = apt::locked(store)?;
    let name = image.file_name().unwrap_or_default().to_string_lossy().replace("vmlinuz", "");
    let place = store.join(format!("vmlinux{name}"));
    let time = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified()).ok();
    if time(&place).is_some_and(|made| Some(made) >= time(image)) {
        return Ok(place);
    }
    let data = fs::read(image).map_err(io("read", image))?;
    let kernel = payload(&data).and_then(decompress).map_err(|found| Error::Unusable {
        path: image.to_path_buf(),
        found,
        remedy: "Xen needs another kernel".into(),
    })?;
    let mut file = tempfile::NamedTempFile::new_in(store).map_err(io("make a file in", store))?;
    file.write_all(&kernel).map_err(io("write", &place))?;
    file.persist(&place).map_err(|e| io("write", &place)(e.error))?;
    Ok(place)
}

fn payload(image: &[u8]) -> std::result::Result<&[u8], String> {
    let number = |at: usize| {
        let bytes = image.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_le_bytes)
    };
    if image.get(MAGIC..MAGIC + 4) != Some(b"HdrS") {
        return Err("no Linux kernel".into());
    }
    let sectors = match image.get(SETUP_SECTORS) {
        Some(0) | None => 4,
        Some(&sectors) => usize::from(sectors),
    };
    let code = (sectors + 1) * 512;
    let place = number(PAYLOAD).zip(number(PAYLOAD + 4)).and_then(|(offset, length)| {
        let from = code.checked_add(offset as usize)?;
        image.get(from..from.checked_add(length as usize)?)
    });
    place.ok_or_else(|| "cut short".into())
}

fn decompress(payload: &[u8]) -> std::result::Result<Vec<u8>, String> {
    let failed = |error: String| format!("not decompressible ({error})");
    let mut kernel = Vec::new();
    match payload {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let decoder = zstd::Decoder::new(payload);
            // One frame: what the kernel's build adds behind it is none.
            let mut decoder = decoder.map_err(|error| failed(error.to_string()))?.single_frame();
            decoder.read_to_end(&mut kernel).map_err(|error| failed(error.to_string()))?;
        }
        [0x1f, 0x8b, ..] => {
            let mut decoder = flate2::read::GzDecoder::new(payload);
            decoder.read_to_end(&mut kernel).map_err(|error| failed(error.to_string()))?;
        }
        [0x7f, b'E', b'L', b'F', ..] => kernel.extend_from_slice(payload),
        other => {
            let magic = other.get(..4).unwrap_or(other);
            return Err(format!("compressed in a way not known here ({magic:02x?})"));
        }
    }
    if kernel.starts_with(b"\x7fELF") { Ok(kernel) } else { Err("no ELF file within".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// A file with a header that points at `payload`.
    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 0x1000];
        image[SETUP_SECTORS] = 3;
        image[MAGIC..MAGIC + 4].copy_from_slice(b"HdrS");
        let (offset, length) = (0x1000 - 4 * 512, payload.len());
        image[PAYLOAD..PAYLOAD + 4].copy_from_slice(&u32::to_le_bytes(offset as u32));
        image[PAYLOAD + 4..PAYLOAD + 8].copy_from_slice(&u32::to_le_bytes(length as u32));
        image.extend_from_slice(payload);
        image.extend_from_slice(b"what follows");
        image
    }

    fn compressed(tool: &str, data: &[u8]) -> Vec<u8> {
        let mut child = Command::new(tool)
            .arg("-c")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|_| panic!("{tool} is missing: apt-get install {tool}"));
        child.stdin.take().unwrap().write_all(data).unwrap();
        child.wait_with_output().unwrap().stdout
    }

    #[test]
    fn the_kernel_comes_out_whole() {
        let mut kernel = b"\x7fELF".to_vec();
        kernel.extend((0..20_000u32).flat_map(u32::to_le_bytes));
        for tool in ["zstd", "gzip"] {
            let mut packed = compressed(tool, &kernel);
            // The kernel's build notes the size behind.
            packed.extend_from_slice(&u32::to_le_bytes(kernel.len() as u32));
            assert!(payload(&image(&packed)).and_then(decompress).unwrap() == kernel, "{tool}");
        }
    }

    #[test]
    fn what_is_no_kernel_is_refused() {
        let whole = image(&compressed("gzip", b"\x7fELF and more"));
        for length in 0..whole.len() - b"what follows".len() {
            assert!(payload(&whole[..length]).and_then(decompress).is_err(), "{length}");
        }
        assert!(payload(&image(b"LZ4?")).and_then(decompress).is_err());
        assert!(payload(&image(&compressed("gzip", b"#!/bin/sh"))).and_then(decompress).is_err());
    }
}
