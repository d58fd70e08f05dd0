//! Virtual block devices: the one place where a guest's bytes move.
