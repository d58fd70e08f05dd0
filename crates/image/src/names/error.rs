//! Why a file that an image names is not opened, and the option by which it would be.

use std::path::{Path, PathBuf};

/// Why a file that an image names is not opened.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// Nobody allowed it.
    #[error("{}", not_allowed(image, role, name, why, option, file.as_deref()))]
    NotAllowed {
        /// The image.
        image: PathBuf,
        /// What the file is to it.
        role: &'static str,
        /// The name in it.
        name: PathBuf,
        /// Why not.
        why: String,
        /// The option by which it may.
        option: &'static str,
        /// The file that the name leads to, if it does.
        file: Option<PathBuf>,
    },
    /// It is the data file of another image.
    #[error("{}", anothers(image, data, owner, *gone))]
    DataOf {
        /// The image.
        image: PathBuf,
        /// The data file.
        data: PathBuf,
        /// Where the image was that it belongs to.
        owner: PathBuf,
        /// Whether that is gone.
        gone: bool,
    },
}

impl NameError {
    /// Name another option, where `--backing` means something else.
    pub fn set_option(&mut self, name: &'static str) {
        if let NameError::NotAllowed { option: option @ "--backing", .. } = self {
            *option = name;
        }
    }
}

fn not_allowed(
    image: &Path,
    role: &str,
    name: &Path,
    why: &str,
    option: &str,
    file: Option<&Path>,
) -> String {
    let named = format!("{} names {name:?} as its {role}, {why}", image.display());
    match file {
        Some(file) => format!("{named}: if it may have that file, add {option} {}", quoted(file)),
        None => named,
    }
}

fn anothers(image: &Path, data: &Path, owner: &Path, gone: bool) -> String {
    let (image, file, owner) = (image.display(), data.display(), owner.display());
    let refused = format!("{image} names {file} as its data file, which is that of {owner}");
    match gone {
        true => format!("{refused}; that image is gone, so add --data-file {}", quoted(data)),
        false => format!("{refused}: two images would overwrite each other's data"),
    }
}

/// A path as a word of a command line.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:,@%=".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_is_told_as_it_is_to_be_written() {
        let mut error = NameError::NotAllowed {
            image: "/a/image".into(),
            role: "backing file",
            name: "b c".into(),
            why: "which nobody allowed".into(),
            option: "--backing",
            file: Some("/a/b c".into()),
        };
        assert!(error.to_string().ends_with("add --backing '/a/b c'"), "{error}");
        error.set_option("--allow-backing");
        assert!(error.to_string().ends_with("add --allow-backing '/a/b c'"), "{error}");
    }
}
