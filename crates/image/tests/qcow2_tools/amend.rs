use ringtap_image::qcow2::{Amendment, amend};

use crate::guest::{be64, header, l2_entry_at, put64};
use crate::oracle::{Folder, with};
use crate::power::{small, try_cuts};

#[test]
fn power_cuts_leave_one_header_or_the_other() {
    let folder = Folder::new();
    for (options, amendment) in [
        (
            "compat=0.10,cluster_size=512",
            Amendment { version: Some(3), lazy_refcounts: Some(true), ..Amendment::default() },
        ),
        ("compat=0.10,cluster_size=4k", Amendment { version: Some(3), ..Amendment::default() }),
        ("compat=1.1", Amendment { lazy_refcounts: Some(true), ..Amendment::default() }),
        ("compat=1.1", Amendment { version: Some(2), ..Amendment::default() }),
    ] {
        small(&folder, options);
        folder.img(&["snapshot", "-c", "one", "small"]);
        let image = std::fs::read(folder.path("small")).expect("the image");
        let wanted = amendment.clone();
        let done = try_cuts(&image, false, move |io, container| {
            let amendment = amendment.clone();
            async move { amend(&io, &container, &amendment).await.expect("amended") }
        });
        let header = header(&done.bytes());
        assert_eq!(header.version, wanted.version.unwrap_or(3));
        assert_eq!(header.compatible & 1 == 1, wanted.lazy_refcounts == Some(true));
    }
}

/// What a pointer led to that leads nowhere is not known: the image stays as it is.
#[test]
fn a_broken_image_does_not_become_one_of_version_2() {
    let folder = Folder::new();
    folder.img(&["create", "-q", "-f", "qcow2", "image", "64M"]);
    folder.io("image", &["write 0 64k", "write -z 64k 64k"]);
    let good = std::fs::read(folder.path("image")).expect("the image");
    for at in [header(&good).l1_offset, l2_entry_at(&good, 1)] {
        let mut image = good.clone();
        let entry = be64(&image, at);
        put64(&mut image, at, entry | 0x2_2a00);
        std::fs::write(folder.path("image"), &image).expect("written");
        let said = with(&folder.path("image"), |io, container| async move {
            let wanted = Amendment { version: Some(2), ..Amendment::default() };
            amend(&io, &container, &wanted).await.expect_err("it is broken").to_string()
        });
        assert!(said.contains("contradicts itself"), "{said}");
        let after = std::fs::read(folder.path("image")).expect("read");
        assert!(after[..image.len()] == image, "{said}");
    }
}
