//! `ringtap disk info`: what is known of a disk that is served, in the words of `ringtap info`.

use serde_json::Value;

use crate::limits;
use crate::output::human;
use crate::running::{elements, text};

/// Lines for people: of the disk as the server lists it, and as it shows it to who inspects it with its `jobs`.
pub(crate) fn lines(disk: &Value, inspected: &Value, jobs: &Value) -> Vec<String> {
    let mut lines = vec![
        format!("disk: {}", text(&disk["node-name"])),
        format!("image: {}", text(&disk["file"])),
        format!("file format: {}", text(&disk["drv"])),
    ];
    let image = &disk["image"];
    let size = number(&image["virtual-size"]);
    lines.push(format!("virtual size: {} ({size} bytes)", human(size)));
    if let Some(size) = image["actual-size"].as_u64() {
        lines.push(format!("disk size: {}", human(size)));
    }
    if disk["encrypted"] == true {
        lines.push("encrypted: yes".into());
    }
    lines.push(format!("access: {}", if disk["ro"] == true { "read-only" } else { "writable" }));
    lines.push(format!("cache: {}", cache(&disk["cache"])));
    lines.extend(below(image));
    lines.extend(local_caches(&inspected["layers"]));
    lines.extend(elements(&disk["exports"]).map(|one| export(one, &inspected["exports"])));
    lines.extend(elements(&inspected["connections"]).map(client));
    lines.extend(elements(&disk["dirty-bitmaps"]).map(bitmap));
    let group = disk["group"].as_str().map(|group| format!(", and those of group {group}"));
    let own = limits::line(&disk["__ringtap_limits"]);
    lines.push(format!("limits: {own}{}", group.unwrap_or_default()));
    let name = &disk["node-name"];
    let its = |job: &&Value| elements(&job["disks"]).any(|of| of == name);
    let all = jobs.as_object().into_iter().flatten();
    lines.extend(all.filter(|(_, it)| its(it)).map(|(id, it)| job(id, it)));
    lines.extend(requests(disk, inspected));
    lines
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

/// A mode of `--cache`.
fn cache(told: &Value) -> &'static str {
    let set = |key: &str| told[key] == true;
    match (set("no-flush"), set("direct"), set("writeback")) {
        (true, ..) => "unsafe",
        (_, true, true) => "none",
        (_, true, false) => "directsync",
        (_, false, true) => "writeback",
        (_, false, false) => "writethrough",
    }
}

/// The images that it lies upon, from the top down.
fn below(image: &Value) -> Vec<String> {
    let mut lines = vec![];
    let mut image = &image["backing-image"];
    while image.is_object() {
        let (name, format) = (text(&image["filename"]), text(&image["format"]));
        let size = human(number(&image["virtual-size"]));
        lines.push(format!("backing file: {name} ({format}, {size})"));
        image = &image["backing-image"];
    }
    lines
}

fn local_caches(top: &Value) -> Vec<String> {
    let layers = std::iter::successors(Some(top), |layer| {
        Some(&layer["below"]).filter(|below| below.is_object())
    });
    let caches = layers.map(|layer| &layer["local_cache"]).filter(|cache| cache.is_object());
    let line = |cache: &Value| match cache["given_up"].as_str() {
        Some(why) => format!("local cache: {}, given up ({why})", text(&cache["folder"])),
        None => format!("local cache: {}", text(&cache["folder"])),
    };
    caches.map(line).collect()
}

fn export(export: &Value, inspected: &Value) -> String {
    let id = text(&export["id"]);
    let places: Vec<&str> = elements(&export["__ringtap_places"]).map(text).collect();
    let access = if inspected[id]["writable"] == true { "writable" } else { "read-only" };
    let closing = if export["shutting-down"] == true { ", closing" } else { "" };
    format!("export {id}: {} at {}, {access}{closing}", text(&export["type"]), places.join(", "))
}

fn client(client: &Value) -> String {
    let queues = number(&client["queues"]);
    let many = if queues == 1 { "queue" } else { "queues" };
    let [transport, peer] = ["transport", "peer"].map(|key| text(&client[key]));
    format!("client: {transport} {peer}, {queues} {many}")
}

fn bitmap(bitmap: &Value) -> String {
    let flags = [("recording", "recording"), ("persistent", "persistent"), ("busy", "in use")];
    let flags = flags.iter().filter(|(key, _)| bitmap[*key] == true).map(|(_, word)| *word);
    let lost = Some("its marks are lost").filter(|_| bitmap["inconsistent"] == true);
    let flags: Vec<&str> = flags.chain(lost).collect();
    let (count, granularity) = (number(&bitmap["count"]), number(&bitmap["granularity"]));
    let more = if flags.is_empty() { String::new() } else { format!(", {}", flags.join(", ")) };
    format!("bitmap {}: {count} bytes in regions of {granularity}{more}", text(&bitmap["name"]))
}

fn job(id: &str, job: &Value) -> String {
    let (done, total) = (number(&job["offset"]), number(&job["total"]));
    let error = job["error"].as_str().map(|error| format!(", {error}"));
    format!(
        "job {id}: {}, {}, {done} of {total} bytes{}",
        text(&job["type"]),
        text(&job["status"]),
        error.unwrap_or_default()
    )
}

fn requests(disk: &Value, inspected: &Value) -> Vec<String> {
    let mut lines = vec![];
    if disk["__ringtap_paused"] == true {
        let held = number(&inspected["held_by_pause"]);
        lines.push(format!("paused: {held} of its requests wait until it is resumed"));
    }
    match disk["__ringtap_waiting-for-room"].as_u64() {
        Some(1) => lines.push("space: 1 request waits for space".into()),
        Some(waiting) => lines.push(format!("space: {waiting} requests wait for space")),
        None => {}
    }
    if inspected["stopped"] == true {
        lines.push("stopped: a panic has stopped it, and the log says which".into());
    }
    let in_flight = || elements(&inspected["queues"]).flat_map(|it| elements(&it["in_flight"]));
    let oldest = in_flight().map(|one| number(&one["age_us"])).max().unwrap_or(0) as f64 / 1e6;
    match in_flight().count() {
        0 => lines.push("requests: none in flight".into()),
        count => lines.push(format!("requests: {count} in flight, the oldest for {oldest:.3} s")),
    }
    lines
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_disk_is_told_of_with_all_that_is_about_it() {
        let disk = json!({
            "node-name": "vm", "file": "/a/top.qcow2", "drv": "qcow2", "ro": false, "encrypted": true,
            "cache": { "writeback": true, "direct": true, "no-flush": false },
            "image": {
                "virtual-size": 2u64 << 30, "actual-size": 200704,
                "backing-image": {
                    "filename": "s3://b/k", "format": "raw", "virtual-size": 1u64 << 30,
                },
            },
            "exports": [{ "id": "e", "type": "nbd", "__ringtap_places": ["nbd://h/e"], "shutting-down": true }],
            "dirty-bitmaps": [{
                "name": "b", "count": 65536, "granularity": 65536, "recording": true, "persistent": true,
                "busy": false, "inconsistent": true,
            }],
            "group": "g", "__ringtap_limits": {}, "__ringtap_paused": true, "__ringtap_waiting-for-room": 2,
        });
        let inspected = json!({
            "layers": { "below": { "local_cache": { "folder": "/c", "given_up": "cannot read" } } },
            "exports": { "e": { "writable": true } },
            "connections": [{ "transport": "nbd", "peer": "h:1", "queues": 1 }],
            "queues": [{ "in_flight": [{ "age_us": 2500 }, { "age_us": 1 }] }],
            "held_by_pause": 3, "stopped": true,
        });
        let jobs = json!({
            "j": { "type": "mirror", "status": "running", "offset": 1, "total": 4, "error": null, "disks": ["vm"] },
            "k": { "type": "commit", "status": "running", "offset": 1, "total": 4, "disks": ["other"] },
        });
        let said = lines(&disk, &inspected, &jobs);
        let without =
            json!({ "node-name": "a", "cache": { "no-flush": true }, "ro": true, "image": {} });
        let none = lines(&without, &json!({}), &json!({}));
        for line in [
            "disk: vm",
            "image: /a/top.qcow2",
            "file format: qcow2",
            "virtual size: 2 GiB (2147483648 bytes)",
            "disk size: 196 KiB",
            "encrypted: yes",
            "access: writable",
            "cache: none",
            "backing file: s3://b/k (raw, 1 GiB)",
            "local cache: /c, given up (cannot read)",
            "export e: nbd at nbd://h/e, writable, closing",
            "client: nbd h:1, 1 queue",
            "bitmap b: 65536 bytes in regions of 65536, recording, persistent, its marks are lost",
            "job j: mirror, running, 1 of 4 bytes",
            "paused: 3 of its requests wait until it is resumed",
            "space: 2 requests wait for space",
            "requests: 2 in flight, the oldest for 0.003 s",
        ] {
            assert!(said.iter().any(|said| said == line), "{line}: {said:#?}");
        }
        assert!(said.iter().any(|said| said.starts_with("limits: ") && said.ends_with("group g")));
        assert!(!said.iter().any(|said| said.starts_with("job k")), "{said:#?}");
        for line in ["cache: unsafe", "access: read-only", "requests: none in flight"] {
            assert!(none.iter().any(|said| said == line), "{line}: {none:#?}");
        }
    }
}
