//! Images as the configuration of a Xen guest names them: the `target=` of a disk.

use std::path::PathBuf;
use std::str::FromStr;

use ringtap_image::{CacheMode, Format, RestartChoice};

/// An image, its format, and how host caching is used where that is said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The image's path, or `null:SIZE`.
    pub path: PathBuf,
    /// Its format; none for `null:SIZE`.
    pub format: Option<Format>,
    /// Host caching, if it is not to be as for other disks.
    pub cache: Option<CacheMode>,
    /// Whether to write to it as that format though it is known to be another.
    pub force_format: bool,
    /// What becomes of a restart log that is in doubt, if it is not to be as for other disks.
    pub restart_log: Option<RestartChoice>,
}

/// Why a target cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// It names no format that there is.
    #[error(
        "{text:?} begins with no format: write target=/PATH for a raw image, else \
         target=FORMAT:/PATH with one of raw, qcow2, vhd, luks"
    )]
    Format {
        /// What was written.
        text: String,
    },
    /// It is not said from where the path goes.
    #[error("the image of {text:?} must be named by its full path")]
    Path {
        /// What was written.
        text: String,
    },
    /// An option that there is not.
    #[error(
        "{option:?} is no option of a target: write force-format, restart-log=use or =drop, or \
         cache=none, writeback, writethrough, directsync or unsafe"
    )]
    Option {
        /// What was written.
        option: String,
    },
}

/// The formats, with the names that Xen's older back ends had for a plain file.
fn format(name: &str) -> Option<Format> {
    match name {
        "aio" | "file" | "phy" => Some(Format::Raw),
        _ => name.parse().ok(),
    }
}

impl Target {
    fn new(path: &str, format: Option<Format>) -> Target {
        Target { path: path.into(), format, cache: None, force_format: false, restart_log: None }
    }
}

fn restart_log(option: &str) -> Option<RestartChoice> {
    match option.strip_prefix("restart-log=")? {
        "use" => Some(RestartChoice::Use),
        "drop" => Some(RestartChoice::Drop),
        "optional" => Some(RestartChoice::Optional),
        _ => None,
    }
}

fn cache(option: &str) -> Option<CacheMode> {
    match option.strip_prefix("cache=")? {
        "none" => Some(CacheMode::None),
        "writeback" => Some(CacheMode::Writeback),
        "writethrough" => Some(CacheMode::Writethrough),
        "directsync" => Some(CacheMode::DirectSync),
        "unsafe" => Some(CacheMode::Unsafe),
        _ => None,
    }
}

impl FromStr for Target {
    type Err = TargetError;

    /// `[FORMAT[,cache=MODE][,force-format][,restart-log=use|drop]:]PATH`. A path alone is a raw image: a format is never guessed.
    fn from_str(text: &str) -> Result<Target, TargetError> {
        let wanted = text.strip_prefix("tap:").unwrap_or(text);
        if wanted.starts_with("null:") {
            return Ok(Target::new(wanted, None));
        }
        let wrong = || TargetError::Format { text: text.to_owned() };
        let (head, path) = match wanted.starts_with('/') {
            true => ("raw", wanted),
            false => wanted.split_once(':').ok_or_else(wrong)?,
        };
        let mut parts = head.split(',');
        let format = parts.next().and_then(format).ok_or_else(wrong)?;
        let (mut mode, mut force_format, mut choice) = (None, false, None);
        for option in parts {
            if option == "force-format" {
                force_format = true;
                continue;
            }
            if let Some(known) = restart_log(option) {
                choice = Some(known);
                continue;
            }
            let known = cache(option);
            mode = Some(known.ok_or_else(|| TargetError::Option { option: option.to_owned() })?);
        }
        if !path.starts_with('/') {
            return Err(TargetError::Path { text: text.to_owned() });
        }
        Ok(Target {
            cache: mode,
            force_format,
            restart_log: choice,
            ..Target::new(path, Some(format))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_as_users_wrote_them_for_other_back_ends() {
        for (text, format, path) in [
            ("/a/b:c,d", Format::Raw, "/a/b:c,d"),
            ("raw:/a", Format::Raw, "/a"),
            ("qcow2:/a", Format::Qcow2, "/a"),
            ("tap:qcow2:/a", Format::Qcow2, "/a"),
            ("tap:aio:/a", Format::Raw, "/a"),
            ("vhd:/a", Format::Vhd, "/a"),
            ("tap:vhd:/a", Format::Vhd, "/a"),
            ("file:/a", Format::Raw, "/a"),
            ("phy:/dev/vg/a", Format::Raw, "/dev/vg/a"),
        ] {
            let wanted = Target::new(path, Some(format));
            assert_eq!(text.parse(), Ok(wanted), "{text}");
        }
        let target: Target = "qcow2,cache=writeback:/a".parse().expect("a target");
        assert_eq!((target.cache, target.force_format), (Some(CacheMode::Writeback), false));
        let target: Target = "raw,force-format:/a".parse().expect("a target");
        assert!(target.force_format);
        let target: Target = "qcow2,restart-log=drop:/a".parse().expect("a target");
        assert_eq!(target.restart_log, Some(RestartChoice::Drop));
        assert_eq!("null:1G".parse().map(|target: Target| target.format), Ok(None));
    }

    #[test]
    fn what_is_no_target_is_refused_with_advice() {
        for (text, said) in [
            ("", "FORMAT:/PATH"),
            ("a.raw", "FORMAT:/PATH"),
            ("qcow3:/a", "FORMAT:/PATH"),
            ("qcow2:a", "full path"),
            ("qcow2,cache=fast:/a", "writeback"),
            ("qcow2,sync:/a", "writeback"),
            ("qcow2,restart-log=keep:/a", "restart-log=use or =drop"),
        ] {
            let error = text.parse::<Target>().expect_err(text).to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
