//! Keyslots changed by `amend`, with QEMU and cryptsetup as the judges.

use std::fs;

use super::bench::Bench;

/// Secrets in files.
fn keys(bench: &Bench) {
    for name in ["one", "two", "three"] {
        fs::write(bench.path(name), format!("secret {name}")).expect("a key");
        bench.ok(&format!("chmod 600 {name}"));
    }
}

#[test]
fn luks_containers_get_secrets_and_lose_them() {
    let bench = Bench::new();
    keys(&bench);
    bench.ok(
        "qemu-img create -q --object secret,id=s,file=one -f luks -o key-secret=s,iter-time=10 \
         a.luks 1M",
    );
    bench.ok("ringtap create -q a.raw 1M");
    bench.qemu_io("-f raw a.raw", &["write -q -P 5 0 1M".into()]);
    bench.ok("ringtap convert -f raw a.raw -O luks -n --target-secret file:one a.luks");
    // By the secret, as each of the three sees it.
    let opens = |key: &str, wanted: bool| {
        let code = i32::from(!wanted);
        bench.ends(
            &format!(
                "qemu-img compare --object secret,id=s,file={key} --image-opts \
                 driver=raw,file.driver=file,file.filename=a.raw \
                 driver=luks,key-secret=s,file.driver=file,file.filename=a.luks"
            ),
            if wanted { 0 } else { 2 },
        );
        let line = format!("cryptsetup open --test-passphrase --key-file {key} a.luks");
        bench.ends(&line, if wanted { 0 } else { 2 });
        let line = format!("ringtap convert -f luks --secret file:{key} a.luks out.raw");
        bench.ends(&line, code);
    };
    let amend = "ringtap amend -f luks";
    let active = "-o state=active,iter-time=10";
    bench.ok(&format!("{amend} --secret file:one {active},new-secret=file:two a.luks"));
    opens("one", true);
    opens("two", true);
    opens("three", false);
    // One that QEMU adds is ours, too.
    bench.ok("qemu-img amend --object secret,id=s,file=two --object secret,id=new,file=three \
         --image-opts driver=luks,key-secret=s,file.driver=file,file.filename=a.luks \
         -o state=active,new-secret=new,keyslot=5,iter-time=10");
    opens("three", true);
    for (line, code, said) in [
        ("--secret file:one -o state=active,new-secret=file:two,keyslot=5", 1, "--force"),
        ("-o state=active,new-secret=file:two", 1, "--secret"),
        ("-o state=active", 2, "new-secret"),
        ("-o state=inactive", 2, "keyslot=N or old-secret"),
        ("-o keyslot=1", 2, "state=active or state=inactive"),
        ("-o state=off", 2, "active or inactive"),
        ("-o state=inactive,keyslot=8", 1, "counts from 0"),
        ("-o size=2M", 2, "size of a LUKS container"),
    ] {
        let told = bench.ends(&format!("{amend} {line} a.luks"), code);
        assert!(told.contains(said), "{told}");
    }
    bench.ok(&format!("{amend} -o state=inactive,old-secret=file:one a.luks"));
    opens("one", false);
    opens("two", true);
    bench.ok(&format!("{amend} -o state=inactive,keyslot=5 a.luks"));
    opens("three", false);
    opens("two", true);
    let told = bench.ends(&format!("{amend} -o state=inactive,keyslot=1 a.luks"), 1);
    assert!(told.contains("nobody could open it"), "{told}");
    bench.ok("ringtap create -q -f luks --target-secret file:one b.luks 1M");
    let line = format!("{amend} --secret file:one {active},new-secret=file:two b.luks");
    assert!(bench.ends(&line, 1).contains("cryptsetup luksAddKey"));
}

#[test]
fn encrypted_qcow2_images_get_secrets_and_lose_them() {
    let bench = Bench::new();
    keys(&bench);
    bench.ok("qemu-img create -q --object secret,id=s,file=one -f qcow2 -o \
         encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 a.qcow2 1M");
    let opens = |key: &str, code: i32| {
        bench.ends(
            &format!(
                "qemu-img check --object secret,id=s,file={key} --image-opts \
                 driver=qcow2,encrypt.key-secret=s,file.driver=file,file.filename=a.qcow2"
            ),
            code,
        );
    };
    let amend = "ringtap amend -f qcow2";
    bench.ok(&format!(
        "{amend} --secret file:one -o \
         compat=1.1,encrypt.state=active,encrypt.new-secret=file:two,encrypt.iter-time=10 a.qcow2"
    ));
    opens("one", 0);
    opens("two", 0);
    bench.ok(&format!("{amend} -o encrypt.state=inactive,encrypt.keyslot=0 a.qcow2"));
    opens("one", 1);
    opens("two", 0);
    bench.ok("ringtap create -q -f qcow2 plain.qcow2 1M");
    let told =
        bench.ends(&format!("{amend} -o encrypt.state=inactive,encrypt.keyslot=0 plain.qcow2"), 1);
    assert!(told.contains("not encrypted"), "{told}");
    let told = bench.ends(&format!("{amend} -o encrypt.format=luks plain.qcow2"), 2);
    assert!(told.contains("encrypt.format"), "{told}");
}
