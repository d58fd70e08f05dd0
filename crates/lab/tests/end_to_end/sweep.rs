//! What a lab that was killed has left.

use std::path::Path;
use std::time::Duration;

use ringtap_lab::backend::loopdev::LoopDevice;
use ringtap_lab::run::scratch;

/// Its loop device, whose file the kernel names by the whole path, and with it its space.
#[test]
fn a_folder_that_is_named_from_here_is_swept_whole() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
        println!("skipped: loop devices need root");
        return;
    }
    let parent = tempfile::tempdir_in(".").unwrap();
    let from_here = Path::new(parent.path().file_name().unwrap());
    let left = from_here.join("ringtap-lab-killed");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("owner"), "").unwrap();
    let file = left.join("disk.raw");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    let whole = std::fs::canonicalize(&file).unwrap();
    let device = LoopDevice::attach(&file, false).unwrap();
    let name = device.path().file_name().unwrap().to_owned();
    let backing = Path::new("/sys/block").join(name).join("loop/backing_file");
    assert_eq!(std::fs::read_to_string(&backing).unwrap().trim(), whole.to_str().unwrap());
    scratch::sweep(from_here, Duration::ZERO);
    assert!(!left.exists());
    let still = std::fs::read_to_string(&backing).unwrap_or_default();
    assert!(!still.contains(whole.to_str().unwrap()), "still attached: {still}");
    // It is detached already; doing it again would hit another's.
    std::mem::forget(device);
}
