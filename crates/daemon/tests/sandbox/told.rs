//! How an attempt ended, and who is told.

use std::fs;
use std::io::{self, Error};

pub type Tell<'a> = &'a dyn Fn(&str, io::Result<()>);

pub fn code(result: i64) -> io::Result<()> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(()) }
}

pub trait Custom {
    fn custom(&mut self, flags: i32) -> &mut Self;
}

impl Custom for fs::OpenOptions {
    fn custom(&mut self, flags: i32) -> &mut Self {
        std::os::unix::fs::OpenOptionsExt::custom_flags(self, flags)
    }
}
