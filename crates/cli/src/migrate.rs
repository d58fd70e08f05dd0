//! `ringtap disk migrate`: a disk that goes on at another host's server, and its checkpoints with it.
//!
//! NBD carries no bitmaps, the control sockets of both servers do. When little is left of the mirror the server there begins to
//! note what changes; what was noted here by then, and what is noted here until the disk has gone, is marked there once it has
//! gone, and is a checkpoint from that moment on. Whatever a guest has written since the checkpoint was made is in one of
//! the two. Stopped anywhere before, there is no checkpoint there, and none that lacks something.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use ringtap_stores::Uri;
use ringtap_stores::nbd::Server;
use serde_json::{Value, json};

use crate::copies::{MirrorArgs, mirror};
use crate::job::{How, OnErrors};
use crate::output::Output;
use crate::qmp::Qmp;
use crate::running::found;
use crate::sockets::control;

/// A disk that goes on at another host's server.
#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// The disk's name
    node: String,

    /// The export in which it is to go on, just as large: nbd://HOST/NAME, nbd+unix:///NAME?socket=PATH, or nbds:// with TLS
    uri: PathBuf,

    /// The export reads as zeros, as one just made does: zeros need not be sent
    #[arg(long)]
    zeroed: bool,

    /// The control socket of the Ringtap that has the export, brought here by ssh -L where that is another host: the disk's
    /// checkpoints go with it
    #[arg(long, value_name = "unix:PATH", value_parser = control, conflicts_with = "no_wait")]
    there: Option<PathBuf>,

    /// The disk's name there [default: the same]
    #[arg(long, value_name = "NODE", requires = "there")]
    node_there: Option<String>,

    /// By how many percent the guest may be slowed where it changes more than the other server takes [default: 20]
    #[arg(long, value_name = "PERCENT")]
    max_slowdown: Option<u32>,

    #[command(flatten)]
    how: How,
}

/// Move it.
pub(crate) fn run(qmp: &mut Qmp, args: MigrateArgs, output: Output) -> anyhow::Result<()> {
    let MigrateArgs { node, uri, zeroed, there, node_there, max_slowdown, how } = args;
    if !ringtap_image::is_store(&uri) {
        let why = format!(
            "{} is no nbd://, nbd+unix:// or nbds:// URI: `ringtap disk mirror` moves a disk to an image of this host",
            uri.display()
        );
        return Err(ringtap_daemon::Error::Usage(why).into());
    }
    not_itself(qmp, &node, &uri)?;
    let all = bitmaps(qmp, &node)?;
    let goes = |one: &&Value| {
        let set = |key: &str| one[key].as_bool().unwrap_or(false);
        there.is_some() && set("persistent") && set("recording") && !set("inconsistent")
    };
    let (go, stay): (Vec<&Value>, Vec<&Value>) = all.iter().partition(goes);
    say_what_stays(&node, &stay)?;
    let mut travel = match &there {
        Some(there) if !go.is_empty() => {
            let node_there = node_there.unwrap_or_else(|| node.clone());
            Some(Travel::to(Qmp::open(there)?, node_there, &go)?)
        }
        _ => None,
    };
    let format = ringtap_image::Format::Raw;
    let (file, since, copy) = (uri, None, false);
    let node_name = node.clone();
    let target_secret = None;
    let args = MirrorArgs {
        node: node_name,
        file,
        format,
        target_secret,
        zeroed,
        since,
        copy,
        max_slowdown,
        on_errors: OnErrors::default(),
        how,
    };
    let mut begun = Ok(());
    let mut ready = || begun = travel.as_mut().map_or(Ok(()), Travel::begin);
    let ended = mirror(qmp, &args, output, &mut ready);
    let Some(mut travel) = travel else { return ended };
    let arrived = match ended {
        Ok(()) => begun.and_then(|()| travel.arrive(qmp, &node)),
        Err(error) => {
            travel.forget();
            return Err(error);
        }
    };
    travel.forget();
    arrived.context("the disk has gone there and its checkpoints have not: the first backup there is a full one")
}

/// Refuse an export of the very disk that is to move: each copy of a region would change it again, without end.
fn not_itself(qmp: &mut Qmp, node: &str, uri: &Path) -> anyhow::Result<()> {
    let parsed = |text: &str| Uri::parse(text).ok();
    let Some(target) = uri.to_str().and_then(parsed) else { return Ok(()) };
    for disk in found(qmp, Some(node))? {
        let exports = disk["exports"].as_array().into_iter().flatten();
        let places = exports.filter_map(|it| it["__ringtap_places"].as_array()).flatten();
        let same = places
            .filter_map(Value::as_str)
            .filter_map(parsed)
            .any(|own| own.export == target.export && is_one_server(&own.server, &target.server));
        if same {
            let why = format!(
                "{} is an export of {node} itself: name one of another server",
                uri.display()
            );
            return Err(ringtap_daemon::Error::Usage(why).into());
        }
    }
    Ok(())
}

/// Whether two names of a server of this host are of one.
fn is_one_server(own: &Server, other: &Server) -> bool {
    match (own, other) {
        (Server::Unix(own), Server::Unix(other)) => {
            let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
            whole(own) == whole(other)
        }
        (Server::Tcp(own, port), Server::Tcp(other, there)) => {
            let here = ["localhost", "127.0.0.1", "::1", "0.0.0.0", "::"];
            let is_here = |host: &String| here.contains(&&**host);
            port == there && (own == other || is_here(own) && is_here(other))
        }
        _ => false,
    }
}

fn name(bitmap: &Value) -> &str {
    bitmap["name"].as_str().unwrap_or_default()
}

fn bitmaps(qmp: &mut Qmp, node: &str) -> anyhow::Result<Vec<Value>> {
    let disks = found(qmp, Some(node))?;
    Ok(disks
        .iter()
        .filter_map(|disk| disk["dirty-bitmaps"].as_array())
        .flatten()
        .cloned()
        .collect())
}

/// Say which checkpoints of a disk do not go with it, before it goes.
fn say_what_stays(node: &str, stay: &[&Value]) -> anyhow::Result<()> {
    if !stay.is_empty() {
        let names: Vec<&str> = stay.iter().map(|one| name(one)).collect();
        writeln!(
            std::io::stderr(),
            "ringtap: these checkpoints of {node} stay behind, for NBD carries none (--there does those that record): {}; the \
             first backup there is a full one",
            names.join(", ")
        )?;
    }
    Ok(())
}

/// Checkpoints on their way.
struct Travel {
    far: Qmp,
    /// The disk's name there.
    node: String,
    /// Each with the bytes of its regions.
    checkpoints: Vec<(String, u64)>,
}

/// What is noted there, and what was noted here, until both are the checkpoint.
fn aside(name: &str) -> [String; 2] {
    ["since", "before"].map(|part| format!("{name}.migrates-{part}"))
}

impl Travel {
    /// See that they can go there.
    fn to(mut far: Qmp, node: String, go: &[&Value]) -> anyhow::Result<Travel> {
        let there = bitmaps(&mut far, &node).context("at the server there")?;
        if let Some(clash) = go.iter().find(|one| there.iter().any(|it| name(it) == name(one))) {
            bail!(
                "{node} has a checkpoint {:?} there: remove it, or leave --there out",
                name(clash)
            );
        }
        let granularity = |one: &Value| one["granularity"].as_u64().unwrap_or_default();
        let checkpoints = go.iter().map(|one| (name(one).to_owned(), granularity(one)));
        Ok(Travel { checkpoints: checkpoints.collect(), far, node })
    }

    /// Little is left: from now on it is noted there what changes.
    fn begin(&mut self) -> anyhow::Result<()> {
        for (name, granularity) in &self.checkpoints {
            let [since, _] = aside(name);
            let add = json!({ "node": self.node, "name": since, "granularity": granularity });
            self.far.call("block-dirty-bitmap-add", add)?;
        }
        Ok(())
    }

    /// The disk has gone: have what was noted here marked there, too, and be the checkpoints.
    fn arrive(&mut self, here: &mut Qmp, node: &str) -> anyhow::Result<()> {
        let action = |of: &str, data: Value| json!({ "type": of, "data": data });
        let mut actions = vec![];
        for (name, granularity) in &self.checkpoints {
            let [since, before] = aside(name);
            let own = json!({ "node": self.node, "name": before, "granularity": granularity, "disabled": true });
            self.far.call("block-dirty-bitmap-add", own)?;
            let mut at = Some(0);
            while let Some(offset) = at {
                let which = json!({ "node": node, "name": name, "offset": offset });
                let mut told = here.call("__ringtap_bitmap-regions", which)?;
                let regions = told["regions"].take();
                let mark = json!({ "node": self.node, "name": before, "regions": regions });
                self.far.call("__ringtap_bitmap-mark", mark)?;
                at = told["next"].as_u64();
            }
            let add = json!({ "node": self.node, "name": name, "granularity": granularity, "persistent": true });
            let merge = json!({ "node": self.node, "target": name, "bitmaps": [since, before] });
            actions.push(action("block-dirty-bitmap-add", add));
            actions.push(action("block-dirty-bitmap-merge", merge));
        }
        self.far.call("transaction", json!({ "actions": actions }))?;
        // They are the disk's, which is there.
        for (name, _) in &self.checkpoints {
            let _ = here.call("block-dirty-bitmap-remove", json!({ "node": node, "name": name }));
        }
        Ok(())
    }

    /// What was needed on the way is not any more.
    fn forget(&mut self) {
        for name in self.checkpoints.iter().flat_map(|(name, _)| aside(name)) {
            // Where it was never made.
            let remove = json!({ "node": self.node, "name": name });
            let _ = self.far.call("block-dirty-bitmap-remove", remove);
        }
    }
}
