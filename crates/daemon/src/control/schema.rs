//! What `query-qmp-schema` says, gathered from the descriptions of the types.
//!
//! Source: QEMU, qapi/introspect.json.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// A type of the wire.
pub(crate) trait Shape: Sized {
    /// Whether a member of this type may be left out.
    const OPTIONAL: bool = false;

    /// Its name in the schema, where it is from now on.
    fn shape(schema: &mut Schema) -> String;
}

/// A type with members.
pub(crate) trait Members: Shape {
    /// Its members as the schema has them.
    fn members(schema: &mut Schema) -> Vec<Value>;
}

/// The types met so far.
#[derive(Default)]
pub(crate) struct Schema {
    types: BTreeMap<String, Value>,
}

impl Schema {
    /// A type of JSON itself.
    pub(crate) fn builtin(&mut self, name: &str, json_type: &str) -> String {
        self.add(name, |_| json!({ "meta-type": "builtin", "json-type": json_type }))
    }

    /// A list.
    pub(crate) fn list(&mut self, element: &str) -> String {
        let name = format!("[{element}]");
        self.add(&name, |_| json!({ "meta-type": "array", "element-type": element }))
    }

    /// Words.
    pub(crate) fn words(&mut self, name: &str, words: &[&str]) -> String {
        self.builtin("str", "string");
        self.add(name, |_| json!({ "meta-type": "enum", "values": words }))
    }

    /// An object.
    pub(crate) fn object<T: Members>(&mut self, name: &str) -> String {
        self.add(name, |schema| json!({ "meta-type": "object", "members": T::members(schema) }))
    }

    /// An object of which one member says which others there are.
    pub(crate) fn choice(
        &mut self,
        name: &str,
        of: impl FnOnce(&mut Schema) -> (Vec<Value>, &'static str, Vec<Value>),
    ) -> String {
        self.add(name, |schema| {
            let (members, tag, variants) = of(schema);
            json!({ "meta-type": "object", "members": members, "tag": tag, "variants": variants })
        })
    }

    /// A member of an object.
    pub(crate) fn member<T: Shape>(&mut self, name: &str) -> Value {
        let of = T::shape(self);
        match T::OPTIONAL {
            true => json!({ "name": name, "type": of, "default": null }),
            false => json!({ "name": name, "type": of }),
        }
    }

    pub(super) fn add(&mut self, name: &str, of: impl FnOnce(&mut Schema) -> Value) -> String {
        if !self.types.contains_key(name) {
            // A type may lie within itself.
            self.types.insert(name.to_owned(), Value::Null);
            let mut found = of(self);
            found["name"] = name.into();
            self.types.insert(name.to_owned(), found);
        }
        name.to_owned()
    }

    /// All of them.
    pub(crate) fn into_values(self) -> Vec<Value> {
        self.types.into_values().collect()
    }
}
