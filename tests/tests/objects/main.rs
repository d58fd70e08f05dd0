//! Images in object stores and behind HTTP.

mod bench;
mod cached;
mod detach;
mod faults;
mod origin;
mod published;
mod s3;
mod served;
mod tls;
