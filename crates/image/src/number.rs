//! Numbers that are drawn.

/// A number of memory that no other has.
pub fn new_number() -> u64 {
    loop {
        match getrandom::u64() {
            Ok(number @ 1..) => return number,
            // The kernel has run out of nothing: it is asked again.
            _ => std::thread::yield_now(),
        }
    }
}
