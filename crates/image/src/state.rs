//! What an open image has in memory, as it is told to people.

use ringtap_stores::LocalCache;
use serde::Serialize;

use crate::{Container, Info, RestartLog};

/// An image and what lies below it.
#[derive(Debug, Default, Serialize)]
pub struct LayerState {
    /// The format's name.
    pub format: &'static str,
    /// The file, where it is known.
    pub path: Option<String>,
    /// Bytes of the disk.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether its own content is enciphered.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
    /// Whether there may be completed writes whose metadata only a flush makes stable.
    pub dirty: bool,
    /// Whether a flush is running.
    pub flushing: bool,
    /// Tables in memory, for a format that has some.
    pub cache: Option<CacheState>,
    /// What is kept on this host of an image that is elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_cache: Option<LocalCache>,
    /// What its server says that it lies in.
    #[serde(skip)]
    pub lies_in: Vec<String>,
    /// Writes to places allocated for them that have not ended.
    pub allocating: u64,
    /// Clusters that were freed and may not be used again yet.
    pub resting: u64,
    /// The restart log.
    pub restart_log: Option<LogState>,
    /// The image below.
    pub below: Option<Box<LayerState>>,
}

/// Tables in memory.
#[derive(Debug, Serialize)]
pub struct CacheState {
    /// Bytes of it in use.
    pub used: u64,
    /// Bytes there may be.
    pub most: u64,
    /// Pieces of tables that a flush has to write.
    pub dirty: u64,
    /// Their bytes.
    pub dirty_bytes: u64,
}

/// A restart log.
#[derive(Debug, Serialize)]
pub struct LogState {
    /// Records that it has room for, before a flush.
    pub room: u64,
    /// Records in all.
    pub capacity: u64,
}

impl LayerState {
    /// The facts alone.
    pub fn of(info: &Info, container: Option<&Container>) -> LayerState {
        LayerState {
            format: info.format,
            path: container.map(|container| container.path().display().to_string()),
            size: info.size,
            read_only: info.read_only,
            lies_in: container.map(Container::lies_in).unwrap_or_default(),
            local_cache: container.and_then(Container::local_cache),
            ..LayerState::default()
        }
    }
}

impl LogState {
    pub(crate) fn of(log: &RestartLog) -> LogState {
        LogState { room: log.room(), capacity: log.capacity() }
    }
}
