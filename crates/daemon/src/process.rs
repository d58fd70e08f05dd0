//! What the whole process is told once: its limits, and that a panic ends it.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Allow as many descriptors as the process may have: each connection and each queue takes some.
pub(crate) fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!("cannot raise the limit of open files: {error}");
        }
    }
}

/// A panic is an error of ours. A server that went on without one of its threads would leave guests
/// waiting for ever; one that ends is seen, and started again.
pub(crate) fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        eprintln!(
            "ringtap: this is an error of Ringtap itself, and it stops here; \
             guests carry on once it is started again. Please report the lines above."
        );
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    /// Runs this test again in a process of its own, which must not survive it.
    #[test]
    fn a_panic_in_any_thread_ends_the_process() {
        const CHILD: &str = "RINGTAP_TEST_PANICS";
        if std::env::var_os(CHILD).is_some() {
            super::abort_on_panic();
            let _ = std::thread::spawn(|| panic!("a thread fell over")).join();
            std::process::exit(0);
        }
        let name = "process::tests::a_panic_in_any_thread_ends_the_process";
        let output = Command::new(std::env::current_exe().expect("the running test"))
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .expect("the test again");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(6), "SIGABRT: {said}");
        assert!(said.contains("a thread fell over") && said.contains("error of Ringtap"), "{said}");
    }
}
