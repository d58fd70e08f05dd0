//! Where an object's bytes come from: one request at a time, each of a range of the object that was opened.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use object_store::aws::AmazonS3Builder;
use object_store::client::HttpError;
use object_store::http::HttpBuilder;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    Attribute, Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt as _, RetryConfig,
};

use crate::credentials::Profile;
use crate::http::{Connector, Encoded, Refused, at_most, cause, first_cause, told};
use crate::trust::distrust;
use crate::uri::{Server, Uri};

/// For the longest transfer of one range.
const LONGEST: Duration = Duration::from_secs(60);

/// Of which index an object is the image, among what its store keeps of it: the SHA-256 of that.
pub(crate) const OF_INDEX: Attribute = Attribute::Metadata(Cow::Borrowed("ringtap-index"));

/// An object at its store.
pub(crate) struct Source {
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The same, where it takes objects in parts.
    pub(crate) parts: Option<Arc<dyn MultipartStore>>,
    pub(crate) path: Path,
}

/// What a request has told of the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) size: u64,
    /// What names these bytes and no others.
    pub(crate) etag: Option<String>,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Another object is there now.
    Replaced,
    /// None is there.
    Missing,
    /// It will fail again.
    Lasting(String),
    /// It may go well in a while: at the earliest then, where the server said so.
    Passing { why: String, after: Option<Duration> },
    /// The store does not let us, by these credentials: others may come.
    Denied(String),
    /// The server may be another than the one that was named: its certificate may be renewed.
    Untrusted(String),
}

impl Failure {
    pub(crate) fn text(&self) -> String {
        match self {
            Failure::Replaced => "the object was replaced while it was open".into(),
            Failure::Missing => "there is no such object".into(),
            Failure::Lasting(why)
            | Failure::Passing { why, .. }
            | Failure::Denied(why)
            | Failure::Untrusted(why) => why.clone(),
        }
    }

    pub(crate) fn passing(why: String) -> Failure {
        Failure::Passing { why, after: None }
    }
}

impl Source {
    /// One whose requests are tried again by whoever asks, who knows for how long.
    pub(crate) fn new(uri: &Uri, connector: &Connector) -> Result<Source, String> {
        Source::with_retries(uri, connector, 0)
    }

    pub(crate) fn with_retries(
        uri: &Uri,
        connector: &Connector,
        max_retries: usize,
    ) -> Result<Source, String> {
        let retry = RetryConfig { max_retries, ..RetryConfig::default() };
        let path = Path::parse(&uri.key).map_err(|error| error.to_string())?;
        let (store, parts): (Arc<dyn ObjectStore>, Option<Arc<dyn MultipartStore>>) =
            match &uri.server {
                Server::S3 { bucket, endpoint, region } => {
                    let mut builder = AmazonS3Builder::from_env()
                        .with_bucket_name(bucket)
                        .with_retry(retry)
                        .with_http_connector(connector.clone());
                    if let Some(endpoint) = endpoint {
                        builder = builder.with_endpoint(endpoint);
                    }
                    if let Some(region) = region {
                        builder = builder.with_region(region);
                    }
                    if let Some(profile) = Profile::find() {
                        builder = builder.with_credentials(Arc::new(profile));
                    }
                    let store = Arc::new(builder.build().map_err(|error| told(&error))?);
                    (store.clone(), Some(store))
                }
                Server::Http(server) => {
                    let builder = HttpBuilder::new()
                        .with_url(server.as_str())
                        .with_retry(retry)
                        .with_http_connector(connector.clone());
                    (Arc::new(builder.build().map_err(|error| told(&error))?), None)
                }
            };
        Ok(Source { store, parts, path })
    }

    /// Its size and name, as the server tells them of its first byte.
    pub(crate) async fn look(&self) -> Result<Facts, Failure> {
        self.fetch(0..1, None).await.map(|(_, facts)| facts)
    }

    /// A range of the object that has this ETag, where that is known.
    pub(crate) async fn get(
        &self,
        range: Range<u64>,
        etag: Option<&str>,
    ) -> Result<Vec<u8>, Failure> {
        let (bytes, facts) = self.fetch(range, etag).await?;
        // There are servers that take no notice of If-Match.
        match etag {
            Some(etag) if facts.etag.as_deref() != Some(etag) => Err(Failure::Replaced),
            _ => Ok(bytes),
        }
    }

    async fn fetch(
        &self,
        range: Range<u64>,
        etag: Option<&str>,
    ) -> Result<(Vec<u8>, Facts), Failure> {
        let len = (range.end - range.start) as usize;
        let options =
            GetOptions::new().with_range(Some(GetRange::Bounded(range))).with_if_match(etag);
        let transfer = async {
            let answer = self.store.get_opts(&self.path, options).await.map_err(of_error)?;
            let (size, etag) = (answer.meta.size, answer.meta.e_tag.clone());
            let bytes = at_most(answer.into_stream(), len).await.map_err(Failure::passing)?;
            if bytes.len() != len {
                return Err(Failure::passing(format!("{} bytes came for {len}", bytes.len())));
            }
            Ok((bytes, Facts { size, etag: etag.filter(|etag| is_strong(etag)) }))
        };
        match tokio::time::timeout(LONGEST, transfer).await {
            Ok(end) => end,
            Err(_) => Err(Failure::passing(format!("no end of {len} bytes in {LONGEST:?}"))),
        }
    }

    /// The name of what lies beside the object by that ending.
    pub(crate) fn path_beside(&self, ending: &str) -> Result<Path, Failure> {
        let path = Path::parse(format!("{}{ending}", self.path));
        path.map_err(|error| Failure::Lasting(error.to_string()))
    }

    /// All of what lies beside the object by that ending; none where nothing does.
    pub(crate) async fn beside(
        &self,
        ending: &str,
        most: usize,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let path = self.path_beside(ending)?;
        let transfer = async {
            let answer = match self.store.get(&path).await.map_err(of_error) {
                Err(Failure::Missing) => return Ok(None),
                answer => answer?,
            };
            let bytes = at_most(answer.into_stream(), most).await.map_err(Failure::passing)?;
            Ok(Some(bytes))
        };
        // Some are large: at the slowest a MiB a second.
        let longest = LONGEST + Duration::from_secs(most as u64 >> 20);
        match tokio::time::timeout(longest, transfer).await {
            Ok(end) => end,
            Err(_) => Err(Failure::passing(format!("no end of {path} in {longest:?}"))),
        }
    }

    /// The size of what is there, where something is, and [`OF_INDEX`].
    pub(crate) async fn there(&self) -> Result<Option<(u64, Option<String>)>, Failure> {
        let head = GetOptions::new().with_head(true);
        match self.store.get_opts(&self.path, head).await.map_err(of_error) {
            Ok(there) => {
                let of = there.attributes.get(&OF_INDEX).map(|of| of.to_string());
                Ok(Some((there.meta.size, of)))
            }
            Err(Failure::Missing) => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

/// Whether an ETag names bytes, and not something of like meaning.
fn is_strong(etag: &str) -> bool {
    !etag.starts_with("W/") && !etag.starts_with("w/") && etag.len() > 2
}

pub(crate) fn of_error(error: Error) -> Failure {
    match &error {
        Error::NotFound { .. } => return Failure::Missing,
        Error::Precondition { .. } => return Failure::Replaced,
        Error::NotSupported { .. } => {
            return Failure::Lasting(format!(
                "the server sends no ranges of it ({}): copy the image, or put it where ranges are served",
                told(&error)
            ));
        }
        _ => {}
    }
    if let Some(refused) = cause::<Refused>(&error) {
        let why = refused.to_string();
        return match refused.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Failure::Denied(why),
            StatusCode::RANGE_NOT_SATISFIABLE => Failure::Lasting(
                "the server has no such range of it: it is empty, or another is there now".into(),
            ),
            // What S3 says of expired credentials, too.
            StatusCode::BAD_REQUEST => Failure::Denied(why),
            status if status.is_server_error() => Failure::Passing { why, after: refused.after },
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                Failure::Passing { why, after: refused.after }
            }
            _ => Failure::Lasting(why),
        };
    }
    if let Some(why) = distrust(&error) {
        return Failure::Untrusted(why);
    }
    match (cause::<Encoded>(&error), cause::<HttpError>(&error)) {
        (Some(encoded), _) => Failure::Lasting(encoded.to_string()),
        (None, Some(http)) => Failure::passing(format!("no answer: {}", first_cause(http))),
        (None, None) => Failure::passing(told(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weak_names_are_none() {
        assert!(
            is_strong("\"a\"") && !is_strong("W/\"a\"") && !is_strong("\"\"") && !is_strong("")
        );
    }
}
