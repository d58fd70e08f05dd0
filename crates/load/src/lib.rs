//! A vhost-user-blk load generator on the blkio crate.
