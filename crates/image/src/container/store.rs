//! Containers that are not on this machine.

use std::path::Path;

use ringtap_io::{Holds, Io, Op};
use ringtap_stores::Store;

use super::{Container, Traits};
use crate::{Error, OpenError, OpenOptions, probe};

impl Container {
    /// What is not on this machine, by its URI. Nothing is recorded of it and nobody locks it: it is
    /// written to as the format that the options name, unless its signature shows another.
    pub(super) fn open_store(path: &Path, options: &OpenOptions) -> Result<Container, OpenError> {
        let name = path.to_string_lossy();
        let read_only = options.read_only;
        let store = Store::open(&name, &ringtap_stores::Options { read_only })?;
        if !read_only {
            probe::may_write_store(path, &store, options)?;
        }
        let container = Container::of_store(path, store);
        let never_synced = !options.cache.flushes();
        Ok(Container { never_synced, ..container })
    }

    /// A store that is open, by its name.
    pub fn of_store(path: &Path, store: Store) -> Container {
        let facts = *store.facts();
        let logical = facts.block.max(512);
        let traits = Traits {
            regular: facts.resizable,
            read_only: facts.read_only,
            request_alignment: facts.block.into(),
            memory_alignment: 1,
            logical_block_size: logical,
            physical_block_size: facts.preferred.max(logical),
        };
        let container = Container::simulated(store.file(), facts.len, traits);
        let (path, store, rotational) = (path.into(), Some(store), facts.rotational);
        Container { path, store, rotational, ..container }
    }

    /// Whether all that is read of it is compared with digests of what it is to be; none where it is no object of a server.
    pub fn is_verified(&self) -> Option<bool> {
        let store =
            self.store.as_ref().filter(|_| ringtap_stores::is_path_of_object(&self.path))?;
        Some(store.facts().verified)
    }

    /// What is kept of it on this host, where it is an object of a server.
    pub fn local_cache(&self) -> Option<ringtap_stores::LocalCache> {
        self.store.as_ref()?.local_cache()
    }

    /// What its server says that it lies in, where it lies on one.
    pub fn lies_in(&self) -> Vec<String> {
        self.store.as_ref().map_or_else(Vec::new, Store::lies_in)
    }

    /// Leave its connection to the next who opens it for reading, where it lies on a server.
    pub fn leave(self) {
        if let Some(store) = self.store {
            store.leave(&self.path.to_string_lossy());
        }
    }

    /// The range is needed no more. [`Error::Unsupported`] where that cannot be told.
    pub(crate) async fn forget(&self, io: &Io, offset: u64, len: u64) -> Result<(), Error> {
        match self.store {
            None => self.punch(io, offset, len).await,
            Some(_) => {
                let op = Op::Forget { file: self.file, offset, len };
                io.to_the_end(op).await.map_err(Error::from_errno)
            }
        }
    }

    /// What the range holds, where the store says so.
    pub(crate) async fn holds(
        &self,
        io: &Io,
        offset: u64,
        len: u64,
    ) -> Result<Option<Holds>, Error> {
        if self.store.is_none() {
            return Ok(None);
        }
        let op = Op::Status { file: self.file, offset, len };
        match io.run(op).await {
            error if error < 0 => Err(Error::from_errno(-error)),
            result => Ok(Some(Holds::of_result(result))),
        }
    }
}
