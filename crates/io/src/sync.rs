//! What threads share memory by. In a program these are `std`'s own. With the feature `shuttle`, which only
//! models have, each use of one is a step at which the model chooses who goes on, so that every order of
//! steps is tried that a seed names. (All steps are sequentially consistent there: a model says nothing of
//! orderings that are too weak.)

#[cfg(not(feature = "shuttle"))]
mod with {
    pub use std::hint::spin_loop;
    pub use std::sync::{Mutex, MutexGuard, OnceLock, atomic};

    /// A step where another thread, or the end of the process, may come between.
    #[inline(always)]
    pub fn step() {}

    /// Whether a model breaks this on purpose, to see that it is noticed.
    #[inline(always)]
    pub const fn broken(_: &str) -> bool {
        false
    }
}

#[cfg(feature = "shuttle")]
mod with {
    use std::cell::Cell;

    pub use shuttle::hint::spin_loop;
    pub use shuttle::sync::{Mutex, MutexGuard, atomic};

    thread_local! {
        /// A model's threads all run on the one that began it.
        static BROKEN: Cell<Option<&'static str>> = const { Cell::new(None) };
    }

    /// A step where another thread, or the end of the process, may come between.
    pub fn step() {
        atomic::AtomicBool::new(false).load(atomic::Ordering::SeqCst);
    }

    /// Whether a model breaks this on purpose, to see that it is noticed.
    pub fn broken(what: &str) -> bool {
        BROKEN.get() == Some(what)
    }

    /// Whether anything is.
    pub fn is_broken() -> bool {
        BROKEN.get().is_some()
    }

    /// Break this from now on, on this thread.
    pub fn break_only(what: Option<&'static str>) {
        BROKEN.set(what);
    }

    /// As `std`'s, but two that make the value at once may both call `make`.
    #[derive(Debug)]
    pub struct OnceLock<T> {
        is_set: atomic::AtomicBool,
        value: std::sync::OnceLock<T>,
    }

    impl<T> OnceLock<T> {
        /// Without a value.
        pub const fn new() -> OnceLock<T> {
            OnceLock { is_set: atomic::AtomicBool::new(false), value: std::sync::OnceLock::new() }
        }

        /// The value, if there is one.
        pub fn get(&self) -> Option<&T> {
            let is_set = self.is_set.load(atomic::Ordering::SeqCst);
            self.value.get().filter(|_| is_set)
        }

        /// The value, made now if there is none.
        pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
            if let Some(value) = self.get() {
                return value;
            }
            let made = make();
            let value = self.value.get_or_init(|| made);
            self.is_set.store(true, atomic::Ordering::SeqCst);
            value
        }
    }

    impl<T> Default for OnceLock<T> {
        fn default() -> OnceLock<T> {
            OnceLock::new()
        }
    }
}

pub use with::*;
