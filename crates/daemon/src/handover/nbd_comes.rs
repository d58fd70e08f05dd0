//! The NBD server that a client had the server before this one start.

use crate::Address;
use crate::tls::NamedCredentials;

/// It, when it is about to go on here.
pub(crate) struct NbdComes {
    pub(crate) address: Address,
    pub(crate) creds: Option<(String, NamedCredentials)>,
    pub(crate) most: Option<u32>,
}
