//! What belongs to a format, as text: each field on a line, in the order in which `qemu-img info` has them.

use serde_json::Value;

/// The fields in QEMU's order. Others stand behind them.
const ORDER: [&str; 34] = [
    "compat",
    "compression-type",
    "lazy-refcounts",
    "bitmaps",
    "refcount-bits",
    "encrypt",
    "data-file",
    "data-file-raw",
    "corrupt",
    "extended-l2",
    // Of LUKS.
    "ivgen-alg",
    "detached-header",
    "hash-alg",
    "cipher-alg",
    "uuid",
    // Of VMDK.
    "cid",
    "parent-cid",
    "create-type",
    "extents",
    "compressed",
    "virtual-size",
    "filename",
    "cluster-size",
    "format",
    "cipher-mode",
    "slots",
    "payload-offset",
    "master-key-iters",
    "active",
    "iters",
    "key-offset",
    "stripes",
    // Of bitmaps.
    "flags",
    "name",
];

/// The lines of a JSON value.
pub(super) fn described(value: &Value, indent: usize) -> Vec<String> {
    let pad = " ".repeat(indent);
    let one = |name: String, value: &Value| match value {
        Value::Object(_) | Value::Array(_) => {
            let mut lines = vec![format!("{pad}{name}:")];
            lines.extend(described(value, indent + 4));
            lines
        }
        Value::String(text) => vec![format!("{pad}{name}: {text}")],
        other => vec![format!("{pad}{name}: {other}")],
    };
    match value {
        Value::Object(fields) => {
            let place = |name: &str| ORDER.iter().position(|it| *it == name).unwrap_or(ORDER.len());
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_by_key(|(name, _)| place(name));
            fields
                .into_iter()
                .flat_map(|(name, value)| one(name.replace('-', " "), value))
                .collect()
        }
        Value::Array(items) => {
            items.iter().enumerate().flat_map(|(i, value)| one(format!("[{i}]"), value)).collect()
        }
        _ => vec![],
    }
}
