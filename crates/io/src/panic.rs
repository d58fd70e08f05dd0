//! Panics that are caught: what was said, by which thread and where.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// An error of the program itself, as a thread met it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panic {
    /// What was said.
    pub message: String,
    /// The thread's name.
    pub thread: String,
    /// The line of the source.
    pub location: Option<String>,
}

thread_local! {
    /// The last of this thread that was not caught yet.
    static LAST: Cell<Option<Panic>> = const { Cell::new(None) };
}

static ANY: AtomicBool = AtomicBool::new(false);

impl Panic {
    /// One that is no panic of Rust's, but is to be met as one: `message` says what failed.
    pub fn of(message: impl Into<String>) -> Panic {
        let thread = std::thread::current().name().unwrap_or("without a name").to_owned();
        Panic { message: message.into(), thread, location: None }
    }

    /// Do something; if it panics, how. Whoever catches it sees to what may be half done.
    #[inline]
    pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Panic> {
        catch_unwind(AssertUnwindSafe(work)).map_err(Panic::caught)
    }

    #[cold]
    fn caught(payload: Box<dyn Any + Send>) -> Panic {
        if let Some(passed_on) = payload.downcast_ref::<Panic>() {
            return passed_on.clone();
        }
        LAST.take().unwrap_or_else(|| Panic::of(message_of(&*payload)))
    }

    /// Panic as another thread did, of which has been reported already.
    pub fn pass_on(self) -> ! {
        std::panic::resume_unwind(Box::new(self))
    }

    /// From now on each panic of the process is noted with its line, and given to `report` first.
    pub fn report_to(report: impl Fn(&Panic) + Send + Sync + 'static) {
        std::panic::set_hook(Box::new(move |info| {
            let panic = Panic {
                location: info.location().map(ToString::to_string),
                ..Panic::of(message_of(info.payload()))
            };
            ANY.store(true, Relaxed);
            report(&panic);
            LAST.set(Some(panic));
        }));
    }

    /// Whether there was one since [`Panic::report_to`], caught or not.
    pub fn any() -> bool {
        ANY.load(Relaxed)
    }
}

fn message_of(payload: &(dyn Any + Send)) -> String {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "a panic without words".to_owned(),
    }
}

impl fmt::Display for Panic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (thread {}", self.message, self.thread)?;
        match &self.location {
            Some(location) => write!(f, ", {location})"),
            None => f.write_str(")"),
        }
    }
}

impl std::error::Error for Panic {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_caught_says_what_and_who_and_where() {
        assert_eq!(Panic::catch(|| 7), Ok(7));
        let panic = Panic::catch(|| panic!("{} fell over", "it")).expect_err("a panic");
        assert_eq!(panic.message, "it fell over");
        Panic::report_to(|_| {});
        let (thread, line) = (std::thread::Builder::new().name("other".into()), line!() + 3);
        let other = thread.spawn(|| {
            // On a line of its own.
            Panic::catch(|| assert!(std::process::id() == 0, "no"))
        });
        let panic = other.expect("a thread").join().expect("caught").expect_err("a panic");
        let said = format!("no (thread other, crates/io/src/panic.rs:{line}:");
        assert!(panic.to_string().starts_with(&said), "{panic} is not {said}");
        assert!(Panic::any());
        let again = Panic::catch(|| panic.clone().pass_on()).expect_err("the same");
        assert_eq!(again, panic);
        drop(std::panic::take_hook());
    }
}
