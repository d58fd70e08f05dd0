//! Places where a tracer may look: static probes of provider `ringtap` (`readelf -n`), each a `nop` until somebody does.
//!
//! Kinds are those of a disk's requests: 0 read, 1 write, 2 flush, 3 discard, 4 write zeroes. contrib/bpftrace has scripts.

use probe::probe;

use crate::Time;

/// A request came.
#[inline(always)]
pub fn request_start(kind: u64, offset: u64, length: u64) {
    probe!(ringtap, request_start, kind, offset, length);
}

/// A request has ended, so many nanoseconds after it came, well (1) or not (0).
#[inline(always)]
pub fn request_done(kind: u64, offset: u64, length: u64, nanos: Time, well: bool) {
    probe!(ringtap, request_done, kind, offset, length, nanos, well);
}

/// Limits held a request for so many nanoseconds.
#[inline(always)]
pub fn throttled(kind: u64, length: u64, nanos: Time) {
    probe!(ringtap, throttled, kind, length, nanos);
}

/// Where the bytes at an offset lie has to be read first.
#[inline(always)]
pub fn map_miss(offset: u64) {
    probe!(ringtap, map_miss, offset);
}

/// An image is made stable: for a client's flush, a job, or the end.
#[inline(always)]
pub fn flush_start() {
    probe!(ringtap, flush_start);
}

/// That has ended, well (1) or not (0).
#[inline(always)]
pub fn flush_done(nanos: Time, well: bool) {
    probe!(ringtap, flush_done, nanos, well);
}

/// A job begins a phase: 0 waiting, 1 copying, 2 following, 3 both, 4 ready, 5 pending, 6 ending, 7 done, 8 failed.
/// It has dealt with so many bytes of so many.
#[inline(always)]
pub fn job_state(job: usize, phase: u8, offset: u64, total: u64) {
    probe!(ringtap, job_state, job, phase, offset, total);
}
