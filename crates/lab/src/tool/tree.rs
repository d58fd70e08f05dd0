//! A tree of files like a kernel's sources: many small ones, a few large, three levels of folders, contents that do not
//! compress. The same arguments make the same tree.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// Files in one folder.
const IN_FOLDER: u64 = 30;
/// Folders in one folder above.
const FOLDERS: u64 = 24;

/// What was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Made {
    /// Files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Makes `files` files of `bytes` bytes together below `dir`.
pub fn make(dir: &Path, files: u64, bytes: u64, seed: u64) -> anyhow::Result<Made> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    // Sizes are spread as sources are: most below the mean, a few many times it.
    let weights: Vec<f64> =
        (0..files).map(|_| (-random.random::<f64>().max(1e-12).ln()).powi(2)).collect();
    let sum: f64 = weights.iter().sum();
    let mut content = vec![0; 1 << 20];
    random.fill_bytes(&mut content);
    let (mut made, mut exact) = (0u64, 0.0);
    for (at, weight) in (0..files).zip(&weights) {
        exact += bytes as f64 * weight / sum;
        let end = if at + 1 == files { bytes } else { (exact as u64).min(bytes) };
        let mut left = end - made.min(end);
        let folder = at / IN_FOLDER;
        let path = dir.join(format!("d{:03}/e{:02}", folder / FOLDERS, folder % FOLDERS));
        if at % IN_FOLDER == 0 {
            fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        let path = path.join(format!("f{:05}.c", at));
        let mut file =
            fs::File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
        while left > 0 {
            // Each file begins elsewhere in the random bytes, so that no two are alike.
            let from = random.random_range(0..content.len() / 2);
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(content.len() - from);
            std::io::Write::write_all(&mut file, &content[from..from + len])
                .with_context(|| format!("cannot write {}", path.display()))?;
            left -= len as u64;
        }
        made = end;
    }
    Ok(Made { files, bytes: made })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(dir: &Path) -> Vec<(String, Vec<u8>)> {
        let mut todo = vec![dir.to_owned()];
        let mut found = Vec::new();
        while let Some(folder) = todo.pop() {
            for entry in fs::read_dir(&folder).unwrap().flatten() {
                if entry.path().is_dir() {
                    todo.push(entry.path());
                } else {
                    let name = entry.path().strip_prefix(dir).unwrap().display().to_string();
                    found.push((name, fs::read(entry.path()).unwrap()));
                }
            }
        }
        found.sort();
        found
    }

    #[test]
    fn the_same_seed_makes_the_same_tree_of_the_size_asked() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for dir in [&one, &two] {
            assert_eq!(
                make(dir.path(), 100, 1 << 20, 7).unwrap(),
                Made { files: 100, bytes: 1 << 20 }
            );
        }
        let files = list(one.path());
        assert_eq!((files.len(), files.iter().map(|f| f.1.len()).sum::<usize>()), (100, 1 << 20));
        assert_eq!(files, list(two.path()));
        let largest = files.iter().map(|f| f.1.len()).max().unwrap();
        assert!(largest > 3 * (1 << 20) / 100, "sizes are spread: {largest}");
    }
}
