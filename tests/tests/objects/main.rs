//! Images in object stores and behind HTTP.

mod bench;
mod cache_disk;
mod cached;
mod detach;
mod faults;
mod origin;
mod published;
mod s3;
mod served;
mod tls;
