//! S3 credentials of `~/.aws/credentials`, which the rest of the chain leaves out.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use async_trait::async_trait;
use object_store::aws::AwsCredential;
use object_store::{CredentialProvider, Error, Result};

/// Files that name who this is, and the authorities that servers' certificates are of, as the environment says. Of one that
/// has a folder of its own the folder: who renews it may put another in its place.
pub(crate) fn files() -> Vec<PathBuf> {
    let named = [
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
    ];
    let named = named.into_iter().filter_map(env::var_os).map(PathBuf::from);
    let usual = env::var_os("HOME").map(|home| PathBuf::from(home).join(".aws"));
    named.flat_map(|path| [of_its_own(&path), Some(path)]).flatten().chain(usual).collect()
}

/// The folder of a file, where that is none that holds much else: of the first below the root, or a home.
fn of_its_own(path: &Path) -> Option<PathBuf> {
    let folder = path.parent().filter(|folder| folder.components().count() > 2)?;
    let is_home = env::var_os("HOME").is_some_and(|home| folder == Path::new(&home));
    (!is_home).then(|| folder.to_owned())
}

/// One profile of such a file; read again when the file has changed, so that who renews them restarts nothing.
#[derive(Debug)]
pub(crate) struct Profile {
    path: PathBuf,
    name: String,
    read: Mutex<Option<(SystemTime, Arc<AwsCredential>)>>,
}

impl Profile {
    /// That of the environment, where nothing there comes before it and its file is there.
    pub(crate) fn find() -> Option<Profile> {
        let first = [
            "AWS_ACCESS_KEY_ID",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_SKIP_SIGNATURE",
        ];
        if first.iter().any(|name| env::var_os(name).is_some()) {
            return None;
        }
        let named = env::var_os("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
        let usual = || Some(PathBuf::from(env::var_os("HOME")?).join(".aws/credentials"));
        let path = named.or_else(usual)?;
        let name = env::var("AWS_PROFILE").unwrap_or_else(|_| "default".to_owned());
        path.exists().then(|| Profile { path, name, read: Mutex::default() })
    }

    fn credential(&self) -> Result<Arc<AwsCredential>, String> {
        let failed = |what: String| format!("{}: {what}", self.path.display());
        let changed = fs::metadata(&self.path).and_then(|facts| facts.modified());
        let changed = changed.map_err(|error| failed(error.to_string()))?;
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = read.as_ref().filter(|(then, _)| *then == changed) {
            return Ok(known.clone());
        }
        let text = read_file(&self.path).map_err(failed)?;
        let found = of_profile(&text, &self.name).ok_or_else(|| {
            failed(format!(
                "profile {} has no aws_access_key_id and aws_secret_access_key",
                self.name
            ))
        })?;
        let found = Arc::new(found);
        *read = Some((changed, found.clone()));
        Ok(found)
    }
}

fn read_file(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| error.to_string())
}

fn of_profile(text: &str, profile: &str) -> Option<AwsCredential> {
    let (mut here, mut id, mut secret, mut token) = (false, None, None, None);
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            here = name.trim() == profile;
        } else if let Some((name, value)) = line.split_once('=').filter(|_| here) {
            let value = Some(value.trim().to_owned());
            match name.trim() {
                "aws_access_key_id" => id = value,
                "aws_secret_access_key" => secret = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    Some(AwsCredential { key_id: id?, secret_key: secret?, token })
}

#[async_trait]
impl CredentialProvider for Profile {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> Result<Arc<AwsCredential>> {
        self.credential().map_err(|error| Error::Generic { store: "S3", source: error.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_holds_much_else_is_no_files_own() {
        assert_eq!(of_its_own(Path::new("/etc/aws")), None);
        assert_eq!(of_its_own(Path::new("/run/secrets/aws")), Some("/run/secrets".into()));
        assert_eq!(of_its_own(Path::new("aws")), None);
    }

    #[test]
    fn a_profile_is_found_among_others() {
        let text = "[other]\naws_access_key_id = no\naws_secret_access_key = no\n\n\
                    [ default ]\n# a comment\naws_access_key_id=ID\naws_secret_access_key = a=b/c\n\
                    region = x\n[last]\naws_session_token = no\n";
        let found = of_profile(text, "default").expect("found");
        assert_eq!((&*found.key_id, &*found.secret_key, found.token), ("ID", "a=b/c", None));
        assert!(of_profile(text, "last").is_none() && of_profile(text, "none").is_none());
    }
}
