//! What a disk is called in the log, and in the names of the threads that serve it.

use tracing::Span;

/// Bytes of a thread's name that Linux shows (TASK_COMM_LEN without its end).
const COMM: usize = 15;
/// Bytes of it that are the disk's; the rest says which of its threads.
pub const LABEL: usize = 10;

/// The target, and the name of the field, of the span of a disk.
pub const DISK: &str = "disk";

/// A disk's name.
pub(crate) struct Name {
    /// Every line that is logged within it names the disk. Entered once by each thread.
    pub(crate) span: Span,
    label: String,
}

impl Default for Name {
    fn default() -> Name {
        Name { span: Span::none(), label: "disk".to_owned() }
    }
}

impl Name {
    pub(crate) fn new(name: &str, label: &str) -> Name {
        Name { span: disk_span(name), label: shortened(label, LABEL) }
    }

    /// The name of one of its threads: the disk first, so that they are sorted by it.
    pub(crate) fn of_thread(&self, role: &str) -> String {
        let most = COMM.saturating_sub(role.len() + 1);
        format!("{}:{role}", shortened(&self.label, most))
    }
}

/// The span in which everything is logged that concerns a disk. Its target is its own, so that no filter
/// for a part of the program takes the name from the lines of another.
pub fn disk_span(name: &str) -> Span {
    tracing::error_span!(target: DISK, "disk", disk = name)
}

/// At most so many bytes of a name: where that is too long, its beginning and its end, for names of one
/// series differ at either.
pub fn shortened(name: &str, most: usize) -> String {
    let name: String = name.chars().filter(|c| !c.is_control()).collect();
    if name.len() <= most {
        return name;
    }
    let kept = most.saturating_sub(1);
    let (mut head, mut tail) = (kept / 2, name.len() - (kept - kept / 2));
    while !name.is_char_boundary(head) {
        head -= 1;
    }
    while !name.is_char_boundary(tail) {
        tail += 1;
    }
    format!("{}~{}", &name[..head], &name[tail..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_bear_the_name_of_their_disk() {
        let thread = |label: &str, role: &str| Name::new("/srv/x", label).of_thread(role);
        assert_eq!(thread("vm1", "vq0"), "vm1:vq0");
        assert_eq!(thread("customer-web-17", "vq15"), "cust~eb-17:vq15");
        assert_eq!(thread("customer-web-17", "vq65535"), "cus~-17:vq65535");
        for (label, role) in [("größenwahn-über", "vq1"), ("a\0b\nc", "nbd"), ("", "nbd")] {
            let name = thread(label, role);
            assert!(name.len() <= COMM && name.ends_with(role), "{name}");
            assert!(!name.contains(char::is_control), "{name:?}");
        }
    }
}
