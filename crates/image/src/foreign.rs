//! Names that QEMU's programs take for an image and that are no path.

/// What to do about a name of a server, or of one of QEMU's drivers; none where it is a path. One with such
/// a beginning is still a path with `./` before it.
pub fn foreign_name(name: &[u8]) -> Option<&'static str> {
    let colon = name.iter().position(|byte| *byte == b':')?;
    let scheme = std::str::from_utf8(name.get(..colon)?).ok()?;
    Some(match scheme {
        "json" => "QEMU's json: names are not read: name the image's file, and its format with -f",
        "file" => "write the path alone, without file:",
        "nbd" | "nbd+unix" | "nbds" | "nbds+unix" if !name[colon..].starts_with(b"://") => {
            "write an NBD export as nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH"
        }
        "http" | "https" | "s3" if name[colon..].starts_with(b"://") => return None,
        "http" | "https" | "s3" => "write an object as s3://BUCKET/KEY or https://HOST/PATH",
        "ftp" | "ftps" | "ssh" | "sftp" => {
            "servers of that kind are not read from: copy the image, or attach it with nbdkit and nbd+unix://"
        }
        "rbd" => return None,
        "iscsi" | "iser" | "nfs" | "gluster" | "gluster+tcp" | "gluster+unix" | "gluster+rdma"
        | "vxhs" | "sheepdog" => {
            "that storage is not supported yet: map it as a block device or mount it, and name that"
        }
        "null-co" | "null-aio" => "write null:SIZE, such as null:10G",
        "blkdebug" | "blkverify" | "blklogwrites" | "fat" | "host_device" | "nvme" | "quorum" => {
            "QEMU's drivers are not read from: name a file or a block device"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_and_drivers_are_told_from_paths() {
        for (name, said) in [
            ("nbd:host:10809:exportname=x", "nbd://HOST"),
            ("nbd:unix:/s", "nbd://HOST"),
            ("json:{\"driver\":\"qcow2\"}", "-f"),
            ("file:a.raw", "without file:"),
            ("ftp://host/a.qcow2", "copy"),
            ("s3:bucket/a.qcow2", "s3://BUCKET"),
            ("iscsi://host/target", "block device"),
        ] {
            assert!(
                foreign_name(name.as_bytes()).is_some_and(|text| text.contains(said)),
                "{name}"
            );
        }
        for path in [
            "a.raw",
            "./nbd://x",
            "nbd://host/x",
            "https://host/a.qcow2",
            "rbd:pool/image",
            "s3://bucket/a.qcow2",
            "/dev/disk/by-path/pci-0000:00",
            "vm:1.raw",
            "null:1G",
        ] {
            assert_eq!(foreign_name(path.as_bytes()), None, "{path}");
        }
    }
}
