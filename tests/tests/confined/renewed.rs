//! Certificates that are renewed by links, as Kubernetes and certbot have it, below a server that is confined.

use std::os::unix::fs::symlink;

use super::*;

/// Have the link lead elsewhere at one stroke.
fn leads(link: &Path, to: &Path) {
    let new = link.with_file_name("new-link");
    symlink(to, &new).expect("a link");
    fs::rename(new, link).expect("in its place");
}

/// Two sets of certificates, each of an authority of its own: `1` and `2`, of which no client believes the other's server.
fn sets(folder: &Path) {
    let script = include_str!("../../../crates/export/tests/nbd/certificates.py");
    for name in ["1", "2"] {
        let place = folder.join(name);
        fs::create_dir(&place).expect("a folder");
        ok("/usr/bin/python3", "python3-cryptography", &["-c", script, plain(&place)]);
    }
}

/// Which of the sets the server shows.
fn shown(server: &Server, folder: &Path) -> &'static str {
    let log = server.log();
    let (_, rest) = log.split_once("nbds://127.0.0.1:").expect("its address");
    let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
    let accepts = |set: &&str| {
        let client = folder.join(set).join("client");
        let uri = format!("nbds://localhost:{port}/?tls-certificates={}", client.display());
        let told = Command::new("nbdinfo").args(["--size", &uri]).output();
        told.expect("apt-get install libnbd-bin").status.success()
    };
    ["1", "2"].into_iter().find(accepts).unwrap_or_else(|| panic!("neither: {}", server.log()))
}

#[test]
fn certificates_renewed_by_links_are_seen_or_that_is_said() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    disk(folder, "a.raw");
    sets(folder);
    // As kubelet does: files lead to `..data`, which is the link that changes.
    let within = folder.join("within");
    fs::create_dir(&within).expect("a folder");
    for set in ["1", "2"] {
        let copy = within.join(format!("..{set}"));
        fs::create_dir(&copy).expect("a folder");
        for file in fs::read_dir(folder.join(set).join("server")).expect("a folder").flatten() {
            fs::copy(file.path(), copy.join(file.file_name())).expect("a copy");
            let name = Path::new("..data").join(file.file_name());
            let _there_already = symlink(name, within.join(file.file_name()));
        }
    }
    leads(&within.join("..data"), Path::new("..1"));
    // The folder that is named is the link.
    let named = folder.join("named");
    leads(&named, &folder.join("1/server"));
    let far = folder.join("2/server");
    for (tls, link, to, after) in [
        ("within", within.join("..data"), Path::new("..2"), "2"),
        ("named", named, far.as_path(), "1"),
    ] {
        let words = format!("serve a.raw -f raw --nbd tcp:127.0.0.1:0 --tls-dir {tls}");
        let mut server = Server::start(folder, &folder.join(format!("log-{tls}")), &words);
        assert_eq!(shown(&server, folder), "1");
        leads(&link, to);
        server.signal(Signal::HUP);
        let told = ["certificates that are there now", "stay in use"];
        until("it does not tell", || told.iter().any(|words| server.log().contains(words)));
        let log = server.log();
        let is_told = log.contains("a confined server reads the folder that was named as it began");
        // Where the kernel has no landlock, nothing keeps it from reading there.
        if !log.contains("landlock") {
            assert_eq!((shown(&server, folder), is_told), (after, after == "1"), "{log}");
        }
        server.signal(Signal::TERM);
        assert!(server.ends().success(), "{}", server.log());
    }
}
