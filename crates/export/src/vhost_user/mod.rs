//! vhost-user-blk.
