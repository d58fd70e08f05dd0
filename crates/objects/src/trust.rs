//! Why a server is not believed to be the one that was named.

use std::error::Error;
use std::io;

use rustls::CertificateError as Wrong;

/// What TLS finds wrong with a server, in words that say what to do; none where something else failed.
pub(crate) fn distrust(error: &(dyn Error + 'static)) -> Option<String> {
    told(tls_of(error)?)
}

fn tls_of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    // An error of the system's does not name what it was made of as its source.
    let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    let within = || inner.and_then(|inner| tls_of(inner));
    let below = || error.source().and_then(tls_of);
    error.downcast_ref().or_else(within).or_else(below)
}

fn told(error: &rustls::Error) -> Option<String> {
    let wrong = match error {
        rustls::Error::InvalidCertificate(wrong) => wrong,
        rustls::Error::InvalidMessage(_) => {
            return Some(format!(
                "no TLS is spoken there ({error}), and what https: names is not asked for in the clear: name the port of \
                 the server's TLS"
            ));
        }
        _ => return None,
    };
    let (what, advice) = match wrong {
        Wrong::UnknownIssuer => (
            "is by no authority that this host trusts".to_owned(),
            "where that authority is to be trusted, have SSL_CERT_FILE name its certificate",
        ),
        Wrong::NotValidForName | Wrong::NotValidForNameContext { .. } => {
            (format!("is for another name ({wrong})"), "name the server as its certificate does")
        }
        Wrong::Expired
        | Wrong::ExpiredContext { .. }
        | Wrong::NotValidYet
        | Wrong::NotValidYetContext { .. } => (
            format!("is not valid today ({wrong})"),
            "have the server's renewed, or set this host's clock",
        ),
        _ => (format!("is not valid ({wrong})"), "the server needs another"),
    };
    Some(format!("the server's certificate {what}, and nothing is asked of that server: {advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_that_is_refused_is_found_below_what_failed_by_it() {
        let of = |wrong| distrust(&rustls::Error::InvalidCertificate(wrong)).expect("told");
        assert!(of(Wrong::UnknownIssuer).contains("SSL_CERT_FILE"));
        assert!(of(Wrong::NotValidForName).contains("another name"));
        assert!(of(Wrong::Expired).contains("today"));
        assert!(of(Wrong::BadSignature).contains("needs another"));
        assert_eq!(distrust(&rustls::Error::DecryptError), None);
        let error = rustls::Error::InvalidCertificate(Wrong::UnknownIssuer);
        let error = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, error));
        assert!(distrust(&error).is_some_and(|why| why.contains("SSL_CERT_FILE")));
        assert_eq!(distrust(&io::Error::from_raw_os_error(libc::ECONNREFUSED)), None);
    }
}
