//! Secrets that `--object` defines for a command.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::IntoRawFd;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustix::fs::{MemfdFlags, memfd_create};

use super::pairs::pairs;

/// Those that are defined, by their IDs.
#[derive(Debug, Default)]
pub(super) struct Secrets(Vec<(String, Kept)>);

#[derive(Debug)]
enum Kept {
    File(String),
    Data(Vec<u8>),
}

impl Secrets {
    /// Take in what `--object` says.
    pub(super) fn define(&mut self, text: &str) -> Result<(), String> {
        let facts = match text.strip_prefix('{') {
            Some(_) => json(text)?,
            None => pairs(text),
        };
        let of =
            |name: &str| facts.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        let kind = of("qom-type").or_else(|| {
            facts.first().filter(|(_, value)| value.is_empty()).map(|(key, _)| key.as_str())
        });
        if kind != Some("secret") {
            return Err("--object defines secrets: write secret,id=ID,file=PATH".into());
        }
        let Some(id) = of("id") else {
            return Err("--object secret: give it an id=ID".into());
        };
        if of("keyid").is_some() {
            return Err(
                "--object secret: one that is encrypted itself is not read; write file=PATH".into(),
            );
        }
        let encoded = of("format") == Some("base64");
        let kept = match (of("file"), of("data")) {
            (Some(path), None) if !encoded => Kept::File(path.to_owned()),
            (Some(path), None) => {
                let read = std::fs::read_to_string(path);
                Kept::Data(decode(
                    &read.map_err(|error| format!("cannot read the secret {path}: {error}"))?,
                )?)
            }
            (None, Some(data)) if encoded => Kept::Data(decode(data)?),
            (None, Some(data)) => Kept::Data(data.as_bytes().to_vec()),
            _ => return Err("--object secret: write either file=PATH or data=TEXT".into()),
        };
        self.0.retain(|(other, _)| other != id);
        self.0.push((id.to_owned(), kept));
        Ok(())
    }

    /// The secret of that ID, as `--secret` takes it. Each call gives one that can be read once.
    pub(super) fn source(&self, id: &str) -> Result<String, String> {
        let Some((_, kept)) = self.0.iter().find(|(other, _)| other == id) else {
            return Err(format!(
                "no secret with the ID {id:?} is defined: add --object secret,id={id},file=PATH"
            ));
        };
        match kept {
            Kept::File(path) => Ok(format!("file:{path}")),
            Kept::Data(bytes) => {
                let failed = |error: std::io::Error| {
                    format!("cannot keep the secret {id:?} in memory: {error}")
                };
                let fd = memfd_create("ringtap-secret", MemfdFlags::CLOEXEC)
                    .map_err(|error| failed(error.into()))?;
                let mut file = File::from(fd);
                file.write_all(bytes)
                    .and_then(|()| file.seek(SeekFrom::Start(0)))
                    .map_err(failed)?;
                // As if it had been started with it.
                Ok(format!("fd:{}", file.into_raw_fd()))
            }
        }
    }

    /// The options of a format without the IDs of secrets: those that are left, and what is to open a new image.
    pub(super) fn in_options(
        &self,
        text: &str,
        makes: bool,
    ) -> Result<(String, Option<String>), String> {
        if !text.contains("secret=") {
            return Ok((text.to_owned(), None));
        }
        let (mut kept, mut target) = (vec![], None);
        for (key, value) in pairs(text) {
            let own = key.strip_prefix("encrypt.").unwrap_or(&key);
            match own {
                "key-secret" if makes => {
                    target = Some(self.source(&value)?);
                    continue;
                }
                "new-secret" | "old-secret" if self.0.iter().any(|(id, _)| *id == value) => {
                    kept.push(format!("{key}={}", self.source(&value)?.replace(',', ",,")));
                }
                _ if value.is_empty() && !text.contains(&format!("{key}=")) => {
                    kept.push(key.replace(',', ",,"));
                }
                _ => kept.push(format!("{key}={}", value.replace(',', ",,"))),
            }
        }
        Ok((kept.join(","), target))
    }
}

fn json(text: &str) -> Result<Vec<(String, String)>, String> {
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|error| format!("--object {error}"))?;
    let members = value.as_object().into_iter().flatten();
    Ok(members
        .map(|(key, value)| (key.clone(), value.as_str().unwrap_or_default().to_owned()))
        .collect())
}

fn decode(text: &str) -> Result<Vec<u8>, String> {
    let text: String = text.split_ascii_whitespace().collect();
    STANDARD
        .decode(text)
        .map_err(|error| format!("--object secret: format=base64, and its text is not: {error}"))
}
