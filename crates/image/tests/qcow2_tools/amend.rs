use ringtap_image::qcow2::{Amendment, amend};

use crate::guest::header;
use crate::oracle::Folder;
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
