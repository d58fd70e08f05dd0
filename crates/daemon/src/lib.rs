//! Many virtual block devices served by one process.
