//! The client of HTTP under all stores: TLS that is verified, and answers that are looked at before anybody else does.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, RETRY_AFTER};
use http::{HeaderValue, StatusCode};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use reqwest::redirect::{Attempt, Policy};
use rustls::{ClientConfig, RootCertStore};

const CONNECT: Duration = Duration::from_secs(5);
/// The longest that nothing comes of an answer that was begun.
const SILENCE: Duration = Duration::from_secs(15);
/// The most of an error's text that is looked at.
const MOST_TEXT: usize = 16 << 10;

/// An answer that is no success.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) status: StatusCode,
    /// After which time the server wants to be asked again.
    pub(crate) after: Option<Duration>,
    /// What S3 calls it.
    pub(crate) code: Option<String>,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server answers {}", self.status)?;
        match &self.code {
            Some(code) => write!(f, " ({code})"),
            None => Ok(()),
        }
    }
}

impl Error for Refused {}

/// An answer in other bytes than the object's.
#[derive(Debug)]
pub(crate) struct Encoded(String);

impl fmt::Display for Encoded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the server sends it with Content-Encoding {:?}, though identity was asked for",
            self.0
        )
    }
}

impl Error for Encoded {}

/// Makes the client, which all requests of the process go through.
#[derive(Clone, Debug)]
pub(crate) struct Connector(reqwest::Client);

impl Connector {
    pub(crate) fn new() -> Result<Connector, String> {
        let mut roots = RootCertStore::empty();
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!("certificate authorities of this host: {error}");
        }
        roots.add_parsable_certificates(found.certs);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            // Ranges in parallel want connections of their own.
            .http1_only()
            .tcp_nodelay(true)
            .connect_timeout(CONNECT)
            .read_timeout(SILENCE)
            .redirect(Policy::custom(redirect))
            .user_agent(concat!("ringtap/", env!("CARGO_PKG_VERSION")))
            .build();
        client.map(Connector).map_err(|error| told(&error))
    }
}

/// Mirrors and regions are followed; nothing that was encrypted goes on in the clear.
fn redirect(attempt: Attempt<'_>) -> reqwest::redirect::Action {
    let was_encrypted = attempt.previous().iter().any(|url| url.scheme() == "https");
    if was_encrypted && attempt.url().scheme() != "https" {
        return attempt.error("the server leads from https: to an address without TLS");
    }
    if attempt.previous().len() > 5 {
        return attempt.error("the server leads on and on");
    }
    attempt.follow()
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Careful(self.0.clone())))
    }
}

#[derive(Debug)]
struct Careful(reqwest::Client);

#[async_trait]
impl HttpService for Careful {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let answer = HttpService::call(&self.0, request).await?;
        let (status, headers) = (answer.status(), answer.headers());
        let encoding = headers.get(CONTENT_ENCODING).map(|value| value.to_str().unwrap_or("?"));
        if let Some(other) = encoding.filter(|name| *name != "identity" && !name.is_empty()) {
            let error = Encoded(other.to_owned());
            return Err(HttpError::new(HttpErrorKind::Unknown, error));
        }
        // These mean something to whoever asked.
        let known = [
            StatusCode::NOT_MODIFIED,
            StatusCode::NOT_FOUND,
            StatusCode::CONFLICT,
            StatusCode::PRECONDITION_FAILED,
        ];
        if status.is_success() || known.contains(&status) {
            return Ok(answer);
        }
        let after = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let after = after.map(Duration::from_secs);
        let text = at_most(answer.into_body().bytes_stream(), MOST_TEXT).await;
        let code = text.ok().and_then(|text| code(&String::from_utf8_lossy(&text)));
        let again = status.is_server_error()
            || [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT].contains(&status);
        let kind = if again { HttpErrorKind::Interrupted } else { HttpErrorKind::Unknown };
        Err(HttpError::new(kind, Refused { status, after, code }))
    }
}

/// All that comes, if it is no more than that.
pub(crate) async fn at_most<E: Error + 'static>(
    mut pieces: impl Stream<Item = Result<Bytes, E>> + Unpin,
    most: usize,
) -> Result<Vec<u8>, String> {
    let mut all = vec![];
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| told(&error))?;
        if all.len() + piece.len() > most {
            return Err(format!("more than {most} bytes come"));
        }
        all.extend_from_slice(&piece);
    }
    Ok(all)
}

/// What S3 calls an error, of the text that it sends.
fn code(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let plain = code.len() < 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    plain.then(|| code.to_owned())
}

/// An error with all that caused it, once each.
pub(crate) fn told(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// What caused all that an error tells of.
pub(crate) fn first_cause(error: &(dyn Error + 'static)) -> String {
    let mut first = error;
    while let Some(cause) = first.source() {
        first = cause;
    }
    first.to_string()
}

/// What caused an error, of that kind.
pub(crate) fn cause<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}
