//! Whether restart logs end with a container, though its guests may live on.

use std::os::linux::fs::MetadataExt;
use std::path::Path;

use ringtap_image::RestartLog;

/// The initial namespace of processes, on every kernel since 3.8 (include/linux/proc_ns.h, `PROC_PID_INIT_INO`).
const INITIAL: &str = "pid:[4026531836]";
/// What managers of containers leave in them.
const SIGNS: [&str; 3] = ["/.dockerenv", "/run/.containerenv", "/run/systemd/container"];
/// What they say to the processes in them: systemd's interface for containers, and Kubernetes, whose pods may be
/// in the host's namespace of processes.
const WORDS: [&str; 2] = ["container", "KUBERNETES_SERVICE_HOST"];

/// Say so where restart logs end with a container, though its guests may live on, or lie on a disk.
pub(crate) fn warn_of_lost_logs() {
    let folder = RestartLog::usual_folder();
    if ringtap_image::folder_is_on_disk() {
        tracing::warn!(
            "restart logs lie in {}, which is not in memory: what is noted there is written to a disk again and again, and a log \
             is of no use after a restart of the machine; give --state-dir a folder on tmpfs",
            folder.display()
        );
    }
    if is_one() && !is_kept(&folder) {
        tracing::warn!(
            "restart logs lie in {}, which ends with this container: what is not flushed then is lost with \
             it, though the guest may live on; give --state-dir a folder of the host that is on tmpfs",
            folder.display()
        );
    }
}

/// Whether this process is in a container.
fn is_one() -> bool {
    let elsewhere = std::fs::read_link("/proc/self/ns/pid")
        .is_ok_and(|name| name.to_str().is_some_and(|name| name != INITIAL));
    elsewhere
        || WORDS.iter().any(|word| std::env::var_os(word).is_some())
        || SIGNS.iter().any(|sign| Path::new(sign).exists())
}

/// Whether a folder is the operator's choice, or mounted into the container.
fn is_kept(folder: &Path) -> bool {
    let device = |path: &Path| std::fs::metadata(path).ok().map(|facts| facts.st_dev());
    let mounted = folder.ancestors().take(2).any(|path| {
        let above = path.parent().and_then(device);
        device(path).is_some_and(|own| above.is_some_and(|above| above != own))
            && path != Path::new("/run")
            && path != Path::new("/dev/shm")
    });
    mounted || ringtap_image::has_folder()
}
