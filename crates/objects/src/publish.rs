//! An image made an object, or a file beside others that a web server shows, with its index.
//!
//! What is there is looked at first: who comes second with another image is told so. The index goes before the image, and
//! only where none is there. It names every byte of the image, so that a publication that was broken off goes on where
//! the same image is published again (`upload`). Of which index an object is the image stands among its metadata: one that was to be
//! replaced and was not may be just as long.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path as FilePath, PathBuf};
use std::sync::atomic::AtomicBool;

use object_store::path::Path;
use object_store::{Attributes, Error, ObjectStore as _, ObjectStoreExt as _, PutMode, PutPayload};

use crate::index::{self, CHUNK, Index, digest};
use crate::journal::Journal;
use crate::source::{Failure, OF_INDEX, Source, of_error};
use crate::upload::{Image, STOPPED, is_set, upload};
use crate::{Server, Uri, boot, connector, runtime};

/// How often one is sent again.
const RETRIES: usize = 8;

/// What is to be published, and how.
#[derive(Clone, Copy, Debug)]
pub struct Publication<'a> {
    /// The image.
    pub file: &'a FilePath,
    /// A boot list of it, recorded before.
    pub boot_list: Option<&'a FilePath>,
    /// Whether another image in its place is replaced.
    pub replace: bool,
    /// A folder in which it is noted what of it has arrived.
    pub uploads: Option<&'a FilePath>,
    /// Set where it is to end before it is whole: what was there before is there then, and no upload that could go on.
    pub stop: Option<&'a AtomicBool>,
}

/// What was published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Its name, with the digest by which it is opened.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 of the index.
    pub digest: [u8; 32],
}

/// Publish an image at `s3://BUCKET/KEY`, or in a folder. `progress` is told of bytes: each is read twice.
pub fn publish(
    what: Publication<'_>,
    target: &str,
    progress: &dyn Fn(u64),
) -> Result<Published, String> {
    let failed = |error: io::Error| format!("{}: {error}", what.file.display());
    // Of devices, too.
    let size = File::open(what.file).and_then(|mut file| file.seek(SeekFrom::End(0)));
    let size = size.map_err(failed)?;
    if size > index::MOST_IMAGE {
        return Err(format!(
            "{} has {size} bytes, and nobody opens an index of more than 1 TiB: publish it as a qcow2 image that takes less",
            what.file.display()
        ));
    }
    let count = size.div_ceil(CHUNK).try_into().unwrap_or(u32::MAX);
    let list = what.boot_list.map(|path| {
        let text = fs::read(path).map_err(|error| error.to_string());
        text.and_then(|text| boot::parse(&text, count).map(|_| text))
            .map_err(|why| format!("the boot list {} {why}", path.display()))
    });
    let list = list.transpose()?;
    let name = what.file.file_name().unwrap_or_default();
    let target = match target.strip_suffix('/') {
        Some(folder) if target.contains("://") => format!("{folder}/{}", name.to_string_lossy()),
        _ => target.to_owned(),
    };
    let uri = match ringtap_stores::is_object(&target) {
        true => Some(Uri::parse(&target)?),
        false => None,
    };
    if let Some(Uri { server: Server::Http(_), .. }) = uri {
        return Err("nothing is uploaded by HTTP: publish to s3://, or to a folder that the web server shows".into());
    }
    let index = index_unless(what.stop, what.file, progress)
        .map_err(|error| if is_set(what.stop) { STOPPED.to_owned() } else { failed(error) })?;
    let bytes = index.to_bytes();
    let digest = digest(&bytes);
    let name = match uri {
        Some(uri) => {
            let source = Source::with_retries(&uri, &connector()?, RETRIES)?;
            let mut journal = Journal::open(what.uploads, &uri.identity(), &digest);
            let put = async { put(&source, what, &index, list, &mut journal, progress).await };
            runtime::handle()?.block_on(put)?;
            let sign = if target.contains('?') { '&' } else { '?' };
            format!("{target}{sign}digest=sha256:{}", hex::encode(digest))
        }
        None => {
            let to = copy(what, FilePath::new(&target), &index, &bytes, list, progress)?;
            to.display().to_string()
        }
    };
    Ok(Published { name, size: index.size(), digest })
}

fn index_of(path: &FilePath, progress: &dyn Fn(u64)) -> io::Result<Index> {
    index_unless(None, path, progress)
}

fn index_unless(
    stop: Option<&AtomicBool>,
    path: &FilePath,
    progress: &dyn Fn(u64),
) -> io::Result<Index> {
    let mut file = File::open(path)?;
    let (mut size, mut digests) = (0, vec![]);
    let mut chunk = Vec::with_capacity(CHUNK as usize);
    loop {
        chunk.clear();
        (&mut file).take(CHUNK).read_to_end(&mut chunk)?;
        if chunk.is_empty() {
            break;
        }
        goes_on(stop)?;
        digests.push(digest(&chunk));
        size += chunk.len() as u64;
        progress(chunk.len() as u64);
    }
    match size {
        0 => Err(io::Error::other("it is empty")),
        size => Ok(Index::of(size, digests)),
    }
}

/// An error once it is to be stopped.
fn goes_on(stop: Option<&AtomicBool>) -> io::Result<()> {
    if is_set(stop) { Err(io::Error::other(STOPPED)) } else { Ok(()) }
}

async fn put(
    source: &Source,
    what: Publication<'_>,
    index: &Index,
    list: Option<Vec<u8>>,
    journal: &mut Journal,
    progress: &dyn Fn(u64),
) -> Result<(), String> {
    let text = |failure: Failure| failure.text();
    let at = |ending| source.path_beside(ending).map_err(text);
    let bytes = index.to_bytes();
    if is_there(source, what, index, &bytes).await? {
        progress(index.size());
        journal.end();
        return put_list(source, list).await;
    }
    let payload = PutPayload::from(bytes.clone());
    let mut former = None;
    // Of one that was broken off the index is there.
    let mut own = journal.is_begun();
    let put = match what.replace {
        true => {
            // Only to put it back: whoever may not read it may replace it.
            former = source.beside(index::ENDING, index::MOST).await.ok().flatten();
            source.store.put(&at(index::ENDING)?, payload).await
        }
        false => {
            let create = PutMode::Create.into();
            source.store.put_opts(&at(index::ENDING)?, payload, create).await
        }
    };
    match put {
        Ok(_) => own = true,
        Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {
            let there = source.beside(index::ENDING, index::MOST).await.map_err(text)?;
            if there.as_ref() != Some(&bytes) {
                return Err(ANOTHER.into());
            }
        }
        Err(error) => return Err(of_error(error).text()),
    }
    let of = Attributes::from_iter([(OF_INDEX, hex::encode(digest(&bytes)))]);
    let image = Image { path: what.file, index, of, stop: what.stop };
    let sent = upload(source, &image, journal, progress).await;
    if sent.is_err() && own && is_set(what.stop) {
        let taken_back = take_back(source, &at(index::ENDING)?, former).await;
        taken_back.map_err(|why| format!("its index is there and it is not: {why}"))?;
    }
    sent?;
    put_list(source, list).await
}

/// The image is as it was, and so is its index to be.
async fn take_back(source: &Source, at: &Path, former: Option<Vec<u8>>) -> Result<(), String> {
    let end = match former {
        Some(bytes) => source.store.put(at, bytes.into()).await.map(drop),
        None => source.store.delete(at).await,
    };
    end.map_err(|error| of_error(error).text())
}

const ANOTHER: &str = "another image is published there: choose another name, or add --replace";

/// Whether the image is there already, all of it; an error where something else is, which nobody said is to be replaced.
async fn is_there(
    source: &Source,
    what: Publication<'_>,
    index: &Index,
    bytes: &[u8],
) -> Result<bool, String> {
    if what.replace {
        return Ok(false);
    }
    // Stores that let nobody list them say so of what is not there; some let us write and not read.
    let there = match source.beside(index::ENDING, index::MOST).await {
        Err(Failure::Denied(_)) => None,
        there => there.map_err(|failure| failure.text())?,
    };
    let object = match source.there().await {
        Err(Failure::Denied(_)) => None,
        object => object.map_err(|failure| failure.text())?,
    };
    match (there, object) {
        (Some(there), _) if there != bytes => Err(ANOTHER.into()),
        (None, Some(_)) => Err(
            "an object is there that was not published with an index: choose another name, or add --replace"
                .into(),
        ),
        // That of an index that was replaced before the object was, or what another program put there.
        (Some(_), Some((size, of))) if size != index.size() || of != Some(hex::encode(digest(bytes))) => Err(format!(
            "an object of {size} bytes is there, which is not known to be that of its index: choose another name, or add --replace"
        )),
        // An upload that was broken off leaves no object.
        (_, None) => Ok(false),
        (Some(_), Some(_)) => Ok(true),
    }
}

async fn put_list(source: &Source, list: Option<Vec<u8>>) -> Result<(), String> {
    let Some(list) = list else { return Ok(()) };
    let path = source.path_beside(boot::ENDING).map_err(|failure| failure.text())?;
    let put = source.store.put(&path, list.into()).await;
    put.map(drop).map_err(|error| of_error(error).text())
}

fn copy(
    what: Publication<'_>,
    folder: &FilePath,
    index: &Index,
    bytes: &[u8],
    list: Option<Vec<u8>>,
    progress: &dyn Fn(u64),
) -> Result<PathBuf, String> {
    if !folder.is_dir() {
        return Err(format!(
            "{} is no folder: publish to a folder, or to s3://BUCKET/KEY",
            folder.display()
        ));
    }
    let to = folder.join(what.file.file_name().unwrap_or_default());
    let with = |ending: &str| {
        let mut name = to.clone().into_os_string();
        name.push(ending);
        PathBuf::from(name)
    };
    let failed = |path: &FilePath, error: io::Error| format!("{}: {error}", path.display());
    // The image may lie there itself.
    let own = fs::canonicalize(&to).ok() == fs::canonicalize(what.file).ok();
    let there = fs::read(with(index::ENDING)).ok();
    let is_equal = there.as_deref() == Some(bytes);
    let len = fs::metadata(&to).map(|facts| facts.len()).ok();
    // One that was to be replaced and was not may be just as long.
    let is_whole = || index_of(&to, &|_| {}).is_ok_and(|found| found == *index);
    let is_there = own || (is_equal && len == Some(index.size()) && is_whole());
    let other = (there.is_some() && !is_equal) || (len.is_some() && !is_there);
    if other && !what.replace {
        return Err(format!("{} is there: choose another name, or add --replace", to.display()));
    }
    let put = |ending: &str, write: &dyn Fn(&FilePath) -> io::Result<()>| {
        let (path, part) = (with(ending), with(&format!("{ending}.part")));
        let put = write(&part)
            .and_then(|()| File::open(&part)?.sync_all())
            .and_then(|()| fs::rename(&part, &path));
        put.map_err(|error| {
            let _ = fs::remove_file(&part);
            failed(&path, error)
        })
    };
    // Before the image: who reads in between has an error, and not bytes that nothing is known of.
    put(index::ENDING, &|part| fs::write(part, bytes))?;
    if own || (is_there && !what.replace) {
        progress(index.size());
    } else {
        put("", &|part| copy_of(what, index, part, progress)).inspect_err(|_| {
            // The image is as it was, and so is its index to be.
            let path = with(index::ENDING);
            let taken_back = match &there {
                Some(bytes) => fs::write(&path, bytes),
                None => fs::remove_file(&path),
            };
            if let Err(error) = taken_back {
                tracing::warn!("{}: {error}: it is not that of the image", path.display());
            }
        })?;
    }
    if let Some(list) = list {
        put(boot::ENDING, &|part| fs::write(part, &list))?;
    }
    Ok(to)
}

/// Write what the index names, and nothing else.
fn copy_of(
    what: Publication<'_>,
    index: &Index,
    to: &FilePath,
    progress: &dyn Fn(u64),
) -> io::Result<()> {
    let path = what.file;
    let mut from = File::open(path)?;
    let to = File::create(to)?;
    to.set_permissions(from.metadata()?.permissions())?;
    let mut chunk = Vec::with_capacity(CHUNK as usize);
    for number in 0..index.size().div_ceil(CHUNK) as u32 {
        chunk.clear();
        goes_on(what.stop)?;
        (&mut from).take(CHUNK).read_to_end(&mut chunk)?;
        if !index.matches(number, &chunk) {
            let why = format!("{} was changed while it was published", path.display());
            return Err(io::Error::other(why));
        }
        // What is not written reads as zeros.
        if !index.is_zero(number) {
            to.write_all_at(&chunk, u64::from(number) * CHUNK)?;
        }
        progress(chunk.len() as u64);
    }
    to.set_len(index.size())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::*;

    fn image(folder: &tempfile::TempDir, byte: u8) -> PathBuf {
        let path = folder.path().join("disk.img");
        let mut bytes = vec![byte; 3 * CHUNK as usize + 5];
        bytes[CHUNK as usize..2 * CHUNK as usize].fill(0);
        fs::write(&path, bytes).expect("written");
        path
    }

    fn publication(file: &FilePath, replace: bool) -> Publication<'_> {
        Publication { file, boot_list: None, replace, uploads: None, stop: None }
    }

    #[test]
    fn an_object_is_replaced_only_where_that_was_said_and_sent_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Arc::new(InMemory::new());
        let source = Source { store: store.clone(), parts: Some(store), path: Path::from("a") };
        let runtime = runtime::handle().expect("threads");
        let publish = |byte: u8, replace: bool| {
            let path = image(&folder, byte);
            let index = index_of(&path, &|_| {}).expect("an index");
            let what = publication(&path, replace);
            let mut journal = Journal::open(None, "a", &[0; 32]);
            runtime.block_on(put(&source, what, &index, None, &mut journal, &|_| {}))
        };
        let there = || {
            let head = runtime.block_on(source.store.head(&source.path)).expect("it is there");
            (head.size, head.e_tag)
        };
        let put = |path: &Path, bytes: Vec<u8>| {
            runtime.block_on(source.store.put(path, bytes.into())).expect("put");
        };
        let refused = |end: Result<(), String>| {
            let why = end.expect_err("it should be refused");
            assert!(why.contains("--replace"), "{why}");
        };
        // What another tool has put there.
        put(&source.path, vec![1; 10]);
        let first = there();
        refused(publish(7, false));
        assert_eq!(there(), first);
        assert_eq!(runtime.block_on(source.beside(index::ENDING, 1000)), Ok(None));
        publish(7, true).expect("published");
        let second = there();
        assert_eq!(second.0, 3 * CHUNK + 5);
        publish(7, false).expect("it is there");
        assert_eq!(there(), second, "it was not sent again");
        refused(publish(8, false));
        assert_eq!(there(), second);
        // One that was broken off goes on; one that is not whole is not written over.
        runtime.block_on(source.store.delete(&source.path)).expect("deleted");
        publish(7, false).expect("published");
        assert_eq!(there().0, second.0);
        put(&source.path, vec![1; 10]);
        refused(publish(7, false));
        assert_eq!(there().0, 10);
        // Killed between the new index and the new image: the former one is there, just as long.
        publish(7, true).expect("published");
        let former = there();
        let path = image(&folder, 8);
        let index = index_of(&path, &|_| {}).expect("an index");
        let beside = source.path_beside(index::ENDING).expect("a name");
        put(&beside, index.to_bytes());
        refused(publish(8, false));
        assert_eq!(there(), former);
        publish(8, true).expect("published");
        publish(8, false).expect("it is there");
    }

    #[test]
    fn an_image_that_no_index_can_be_read_of_is_refused_unread() {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let path = folder.path().join("large");
        File::create(&path).and_then(|file| file.set_len((1 << 40) + 1)).expect("a file");
        let target = folder.path().display().to_string();
        let why = publish(publication(&path, false), &target, &|_| panic!("it is read"));
        assert!(why.is_err_and(|why| why.contains("1 TiB")));
    }

    #[test]
    fn a_folder_has_the_image_of_its_index_and_no_half_of_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let www = tempfile::tempdir().expect("a folder");
        let target = www.path().display().to_string();
        let path = image(&folder, 7);
        let to = www.path().join("disk.img");
        let names = || {
            let found = fs::read_dir(www.path()).expect("listed").flatten();
            let mut names: Vec<_> = found.map(|entry| entry.file_name()).collect();
            names.sort();
            names
        };
        let publish = |replace: bool| publish(publication(&path, replace), &target, &|_| {});
        fs::write(&to, vec![1; 10]).expect("another's");
        assert!(publish(false).is_err_and(|why| why.contains("--replace")));
        publish(true).expect("published");
        assert!(fs::read(&to).expect("the copy") == fs::read(&path).expect("the image"));
        assert_eq!(names(), ["disk.img", "disk.img.rtidx"]);
        // The same again; and where only the index is there.
        publish(false).expect("it is there");
        fs::remove_file(&to).expect("removed");
        publish(false).expect("it goes on");
        assert!(fs::read(&to).expect("the copy") == fs::read(&path).expect("the image"));
        // Killed between the new index and the new image: the former one is there, just as long.
        image(&folder, 6);
        let index = index_of(&path, &|_| {}).expect("an index");
        let beside = www.path().join("disk.img.rtidx");
        fs::write(&beside, index.to_bytes()).expect("written");
        assert!(publish(false).is_err_and(|why| why.contains("--replace")));
        image(&folder, 7);
        publish(true).expect("published");
        // An image that changes under the copy takes no other's place.
        let index = index_of(&path, &|_| {}).expect("an index");
        image(&folder, 8);
        let what = publication(&path, true);
        let why = copy(what, www.path(), &index, &index.to_bytes(), None, &|_| {});
        assert!(why.is_err_and(|why| why.contains("was changed")));
        assert_eq!(fs::read(&to).expect("the former")[0], 7);
        assert_eq!(names(), ["disk.img", "disk.img.rtidx"]);
    }
}
