//! What a slot does with a request.

use ringtap_io::{Buffer, Mem, PAGE};
use ringtap_vbd::{Error, Kind, Refusal, Request};

use super::answer::Reply;
use super::connection::Connection;
use super::request::{Command, Header, error_of};
use super::slot::Job;
use super::status;
use super::wire::errno;

/// Bytes one cache request brings in at most, and in one piece.
const MAX_CACHED: u64 = 32 << 20;
const CACHE_PIECE: usize = 256 << 10;

/// Bytes that are discarded or zeroed at once.
const PIECE: u64 = 1 << 30;

impl Connection {
    /// Bytes of memory that a command needs before it can begin.
    pub(super) fn memory_for(&self, command: Command, header: &Header) -> usize {
        match command {
            Command::Read { .. } if self.lends_pages(header) => PAGE,
            Command::Read { .. } | Command::Write => header.len as usize,
            Command::Cache => (header.len as usize).min(CACHE_PIECE),
            Command::BlockStatus { one, of } => status::memory_for(of.len(), one, header.extended),
            // Of which contexts it is about is known only once the payload is there.
            Command::NarrowBlockStatus { one } => {
                let answer = status::memory_for(self.contexts.len(), one, header.extended);
                answer.max(header.len as usize)
            }
            _ => 0,
        }
    }

    pub(super) async fn carry_out(&self, job: Job) -> (Header, Reply) {
        let Job { header, command, buffer } = job;
        let reply = match command {
            Ok(command) => match self.try_to(&header, command, buffer).await {
                Ok(reply) => reply,
                Err(error) => Reply::Failed(error_of(command, error), words(error)),
            },
            Err(error) => {
                let why = refusal(error);
                // Every request that comes after the word to stop is answered so.
                if error != errno::ESHUTDOWN {
                    let (offset, length) = (Some(header.offset), Some(header.len));
                    let operation = header.operation();
                    self.vbd.tell_of_refusal(&Refusal { operation, offset, length, why });
                }
                Reply::Failed(error, why)
            }
        };
        (header, reply)
    }

    async fn try_to(
        &self,
        header: &Header,
        command: Command,
        buffer: Option<Buffer>,
    ) -> Result<Reply, Error> {
        let kind = match (command, buffer) {
            (Command::Read { whole }, Some(buffer)) => {
                return self.read(header, whole, buffer).await;
            }
            (Command::Write, Some(buffer)) => {
                let end = self
                    .transfer(header, Kind::Write, 0, buffer.mem().window(0, header.len as usize))
                    .await;
                self.memory.give_back(buffer);
                return end.map(|()| Reply::Done);
            }
            (Command::Cache, Some(buffer)) => {
                let end = self.cache(header, &buffer).await;
                self.memory.give_back(buffer);
                return end.map(|()| Reply::Done);
            }
            (Command::BlockStatus { one, of }, Some(buffer)) => {
                return self.block_status(header, one, of, buffer).await;
            }
            (Command::Flush, _) => Kind::Flush,
            (Command::Trim, _) => Kind::Discard,
            (Command::WriteZeroes { unmap, fast }, _) => Kind::WriteZeroes { unmap, fast },
            // A read or write of nothing.
            _ => return Ok(Reply::Done),
        };
        self.in_pieces(header, kind).await.map(|()| Reply::Done)
    }

    /// Carry out what needs no memory, piece by piece, so that a request about all of a large disk does
    /// not hold up the end of a connection.
    async fn in_pieces(&self, header: &Header, kind: Kind) -> Result<(), Error> {
        let (mut offset, end) = (header.offset, header.offset + header.len);
        loop {
            let piece = (offset / PIECE + 1).saturating_mul(PIECE).min(end);
            let (len, last) = (piece - offset, piece == end);
            // A write that is stable itself makes nothing before it so.
            let request = Request { kind, offset, len, mem: Mem::EMPTY, fua: header.fua() };
            self.vbd.serve(&self.io, request).await?;
            if last {
                return Ok(());
            }
            if self.is_over() || self.vbd.is_lost() {
                return Err(Error::Os(libc::ESHUTDOWN));
            }
            offset = piece;
        }
    }

    /// Move a part of a request, which begins `from` bytes into it, between the disk and `mem`.
    #[inline]
    pub(super) async fn transfer(
        &self,
        header: &Header,
        kind: Kind,
        from: usize,
        mem: Mem,
    ) -> Result<(), Error> {
        let offset = header.offset + from as u64;
        let request = Request { kind, offset, len: mem.len() as u64, mem, fua: header.fua() };
        self.vbd.serve(&self.io, request).await
    }

    /// Bring the range into the host's page cache, where the image is read through it.
    async fn cache(&self, header: &Header, buffer: &Buffer) -> Result<(), Error> {
        if self.vbd.cache().direct() {
            return Ok(());
        }
        let len = header.len.min(MAX_CACHED);
        let mut done = 0;
        while done < len {
            let part = (len - done).min(CACHE_PIECE as u64);
            let mem = buffer.mem().window(0, part as usize);
            let offset = header.offset + done;
            let request = Request { kind: Kind::Read, offset, len: part, mem, fua: false };
            self.vbd.serve(&self.io, request).await?;
            done += part;
        }
        Ok(())
    }
}

/// A few words on why a request was not begun.
fn refusal(error: u32) -> &'static str {
    match error {
        errno::EPERM => "the export is read-only",
        errno::EINVAL => "unknown, not agreed on, or past the end of the export",
        errno::ENOSPC => "past the end of the export",
        errno::EOVERFLOW => "more than 32 MiB at once",
        errno::ESHUTDOWN => "the server is stopping",
        errno::ENOMEM => "the server has no memory left",
        _ => "",
    }
}

/// A few words on what went wrong.
fn words(error: Error) -> &'static str {
    match error {
        Error::Os(libc::EIO) | Error::Lost => "the host's disk reports an I/O error",
        Error::Os(libc::ESHUTDOWN) => "the server is stopping",
        Error::Os(_) => "the host's kernel refused",
        Error::Range => "past the end of the export",
        Error::ReadOnly => "the image is read-only",
        Error::Full => "no space left where the image lies",
        Error::Corrupt => "the image contradicts itself",
        Error::Unsupported => "zeros would have to be written one by one",
        Error::Stopped => "the disk was stopped by an error of the server itself",
    }
}
