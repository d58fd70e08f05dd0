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

#[test]
fn new_images_take_the_luks_options_of_qemu_img() {
    let bench = Bench::new();
    fs::write(bench.path("one"), "the first secret").expect("a secret");
    bench.ok("chmod 600 one");
    let more = "cipher-alg=aes-128,cipher-mode=xts,ivgen-alg=plain64,hash-alg=sha512,iter-time=10";
    bench.ok(&format!(
        "ringtap create -q -f luks --target-secret file:one -o version=1,{more} a 1M"
    ));
    let inner = format!("encrypt.{}", more.replace(',', ",encrypt."));
    bench.ok(&format!(
        "ringtap create -q -f qcow2 --target-secret file:one -o encrypt.format=luks,{inner} b 1M"
    ));
    let of_qcow2 = |it: &serde_json::Value| it["format-specific"]["data"]["encrypt"].clone();
    let of_luks = |it: &serde_json::Value| it["format-specific"]["data"].clone();
    for theirs in [
        of_luks(&bench.json("qemu-img info --output json a")),
        of_qcow2(&bench.json("qemu-img info --output json b")),
    ] {
        for (field, wanted) in [
            ("cipher-alg", "aes-128"),
            ("cipher-mode", "xts"),
            ("ivgen-alg", "plain64"),
            ("hash-alg", "sha512"),
        ] {
            assert_eq!(theirs[field], wanted, "{theirs}");
        }
        let iterations = theirs["slots"][0]["iters"].as_u64().expect("a number");
        assert!(iterations < 100_000, "those of ten milliseconds: {iterations}");
    }
    for (wrong, wanted) in [
        ("cipher-alg=serpent-256", "aes-256 or aes-128"),
        ("hash-alg=md5", "md5"),
        ("iter-time=soon", "milliseconds"),
        ("key-secret=s", "--object secret,id=s"),
        ("cipher-mode=cbc", "xts"),
    ] {
        let line = format!("ringtap create -f luks --target-secret file:one -o {wrong} c 1M");
        let said = bench.ends(&line, 2);
        assert!(said.contains(wanted), "{said}");
    }
}
