use super::*;

fn translated(line: &str) -> Result<String, String> {
    let words = line.split(' ').map(OsString::from).collect();
    let words = translate(words, &crate::args::command())?;
    let texts: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    Ok(texts.join(" "))
}

#[test]
fn what_qemu_describes_is_named_by_its_path() {
    for (line, wanted) in [
        ("ringtap info a.qcow2", "ringtap info a.qcow2"),
        ("ringtap info --image-opts driver=qcow2,file.filename=a,,b", "ringtap info -f qcow2 a,b"),
        (
            "ringtap check --object secret,id=s,file=key --image-opts driver=luks,key-secret=s,file.driver=file,file.filename=a",
            "ringtap check --secret file:key -f luks a",
        ),
        (
            r#"ringtap compare a json:{"driver":"raw","file":{"driver":"nbd","host":"h","port":"1","export":"e"}}"#,
            "ringtap compare -F raw a nbd://h:1/e",
        ),
        (
            "ringtap convert -pf qcow2 -O raw --image-opts driver=qcow2,file.filename=a,force-share=on b",
            "ringtap convert -U -p -f qcow2 -O raw a b",
        ),
        (
            "ringtap convert --object secret,id=s,file=key -O luks -o key-secret=s,iter-time=10 a b",
            "ringtap convert --target-secret file:key -O luks -o iter-time=10 a b",
        ),
        (
            "ringtap amend --object secret,id=new,file=k a -o encrypt.state=active,encrypt.new-secret=new",
            "ringtap amend a -o encrypt.state=active,encrypt.new-secret=file:k",
        ),
        (
            "ringtap map --image-opts driver=nbd,server.type=unix,server.path=/s,x-dirty-bitmap=qemu:dirty-bitmap:b",
            "ringtap map --context=qemu:dirty-bitmap:b -f raw nbd+unix://?socket=/s",
        ),
        (
            "ringtap info --image-opts driver=nbd,host=h,export=a?b%c",
            "ringtap info -f raw nbd://h/a%3Fb%25c",
        ),
        (
            "ringtap info --image-opts driver=qcow2,file.driver=rbd,file.pool=vms,file.image=a:b,file.conf=/c,file.user=u",
            r"ringtap info -f qcow2 rbd:vms/a\:b:conf=\/c:id=u",
        ),
        (
            r#"ringtap map json:{"driver":"rbd","pool":"p","namespace":"n","image":"i","snapshot":"s"}"#,
            "ringtap map -f raw rbd:p/n/i@s",
        ),
        (
            "ringtap info --image-opts driver=qcow2,file.driver=rbd,file.filename=rbd:vms/web",
            "ringtap info -f qcow2 rbd:vms/web",
        ),
        (
            "ringtap info --image-opts driver=qcow2,file.driver=https,file.url=https://h/x,file.sslverify=on,file.readahead=64k",
            "ringtap info -f qcow2 https://h/x",
        ),
        (
            "ringtap info --image-opts driver=nbd,path=/a&b+c,export=e/f",
            "ringtap info -f raw nbd+unix:///e/f?socket=/a%26b%2Bc",
        ),
        (
            "ringtap compare --object secret,id=a,file=k --object secret,id=b,file=l --image-opts \
             driver=luks,key-secret=a,file.filename=x driver=luks,key-secret=b,file.filename=y",
            "ringtap compare --secret file:k --second-secret file:l -f luks -F luks x y",
        ),
        (
            "ringtap convert --object secret,id=a,file=k --object secret,id=b,file=l --image-opts -O raw \
             driver=luks,key-secret=a,file.filename=x driver=luks,key-secret=b,file.filename=y z",
            "ringtap convert --secret file:k --secret file:l -f luks -O raw x y z",
        ),
        (
            "ringtap commit --object secret,id=a,file=k --object secret,id=b,file=l --image-opts \
             driver=qcow2,encrypt.key-secret=a,backing.encrypt.key-secret=b,file.filename=x",
            "ringtap commit --secret file:k --secret file:l -f qcow2 x",
        ),
        (
            "ringtap check --object secret,id=b,file=l --image-opts \
             driver=luks,key-secret=a,file.filename=y,key-secret=b,file.filename=x",
            "ringtap check --secret file:l -f luks x",
        ),
        (
            "ringtap snapshot -l --image-opts driver=qcow2,read-only=on,file.filename=a",
            "ringtap snapshot -f qcow2 -l a",
        ),
        ("ringtap info nbd:unix:/s:exportname=x", "ringtap info nbd+unix:///x?socket=/s"),
        (
            "ringtap create -f qcow2 -o backing_file=a,,b b",
            "ringtap create -f qcow2 -o backing_file=a,,b b",
        ),
        (
            "ringtap create -f foo -f qcow2 -o a=1 -o b=2 a 1M",
            "ringtap create -f qcow2 -o a=1 -o b=2 a 1M",
        ),
        (
            r"ringtap info json:{'driver':'qcow2','file':{'driver':'file','filename':'a\'b'}}",
            "ringtap info -f qcow2 a'b",
        ),
        ("ringtap serve --image-opts", "ringtap serve --image-opts"),
        // A word that is a verb's elsewhere.
        (
            "ringtap serve a --name check -f raw --secret file:k b -f raw",
            "ringtap serve a --name check -f raw --secret file:k b -f raw",
        ),
        ("ringtap disk resize vm 1G --object x", "ringtap disk resize vm 1G --object x"),
        (
            "ringtap convert --image-opts driver=raw,file.filename=a -O raw b --io threads",
            "ringtap convert -f raw a -O raw b --io=threads",
        ),
        // No server's, whatever it looks like.
        ("ringtap info file:nbd://h/x", "ringtap info ./nbd://h/x"),
        ("ringtap info file:/a:b", "ringtap info /a:b"),
        (
            "ringtap info --image-opts driver=qcow2,file.driver=file,file.filename=http://h/x",
            "ringtap info -f qcow2 ./http://h/x",
        ),
        // Bytes as they are.
        ("ringtap info --image-opts driver=file,filename=a", "ringtap info -f raw a"),
        ("ringtap resize --shrink a -1G", "ringtap resize --shrink a -1G"),
    ] {
        assert_eq!(translated(line).as_deref(), Ok(wanted), "{line}");
    }
}

#[test]
fn what_cannot_be_is_told() {
    for (line, said) in [
        ("ringtap info --image-opts driver=blkdebug,file.filename=a", "QEMU's own"),
        (
            "ringtap info --image-opts driver=qcow2,backing.driver=raw,file.filename=a",
            "backing.driver",
        ),
        (
            "ringtap info --image-opts driver=luks,key-secret=s,file.filename=a",
            "--object secret,id=s",
        ),
        ("ringtap info --object iothread,id=x a", "defines secrets"),
        ("ringtap info --image-opts driver=rbd,pool=p", "file.pool and file.image"),
        ("ringtap info --image-opts driver=raw,file.filename=a,file.pool=p", "file.driver=rbd"),
        (
            "ringtap info --image-opts driver=raw,file.driver=https,file.url=https://h/x,file.sslverify=off",
            "file.sslverify",
        ),
        (
            "ringtap convert --image-opts driver=raw,file.filename=a driver=vpc,file.filename=b c",
            "two formats",
        ),
        ("ringtap info json:{", "described in JSON"),
        (
            "ringtap info --image-opts driver=nbd,host=h,x-dirty-bitmap=qemu:dirty-bitmap:b",
            "only map",
        ),
        (
            "ringtap resize --image-opts driver=raw,read-only=on,file.filename=a 1G",
            "read-only=on says",
        ),
        (
            "ringtap snapshot -c s --image-opts driver=qcow2,read-only=on,file.filename=a",
            "read-only=on says",
        ),
        (
            "ringtap compare --object secret,id=a,file=k --object secret,id=b,file=l --image-opts driver=raw,file.filename=x \
             driver=qcow2,encrypt.key-secret=a,backing.key-secret=b,file.filename=y",
            "a and b",
        ),
        (
            "ringtap convert -O raw json:{'driver':'raw','file':{'driver':'file','filename':'a'}} b c",
            "others not",
        ),
        ("ringtap info -f qcow2 --image-opts driver=raw,file.filename=a", "-f qcow2 of an image"),
    ] {
        let error = translated(line).expect_err(line);
        assert!(error.contains(said), "{line}: {error}");
    }
}

#[test]
fn data_on_the_command_line_is_read_once_from_a_descriptor() {
    let mut secrets = Secrets::default();
    secrets.define("secret,id=s,data=MTIz,format=base64").expect("a secret");
    let source = secrets.source("s").expect("a descriptor");
    let secret = crate::secret::source(&source).expect("a source").read().expect("a secret");
    assert_eq!(secret.bytes(), b"123");
}
