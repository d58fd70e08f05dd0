//! What is named, or described where it is needed.

use serde_json::{Value, json};

use super::refusal::Refusal;
use super::schema::{Schema, Shape};
use super::shape::{Read, wrong_type};

/// A node by its name, or what a node would be.
#[derive(Debug)]
pub(crate) enum NodeOr<T> {
    Node(String),
    Of(T),
}

impl<T: Shape> Shape for NodeOr<T> {
    fn shape(schema: &mut Schema) -> String {
        let of = T::shape(schema);
        let name = String::shape(schema);
        schema.alternate(&format!("{of}Ref"), &[&of, &name])
    }
}

impl<T: Read> Read for NodeOr<T> {
    fn read(value: Value, at: &str) -> Result<NodeOr<T>, Refusal> {
        match value {
            Value::String(name) => Ok(NodeOr::Node(name)),
            value => T::read(value, at).map(NodeOr::Of),
        }
    }
}

/// What lies below an image: a node by its name, what a node would be, or nothing.
#[derive(Debug)]
pub(crate) enum Backing<T> {
    Node(String),
    Of(Box<T>),
    Nothing,
}

impl<T: Shape> Shape for Backing<T> {
    fn shape(schema: &mut Schema) -> String {
        let of = T::shape(schema);
        let name = String::shape(schema);
        let nothing = schema.builtin("null", "null");
        schema.alternate("Backing", &[&of, &name, &nothing])
    }
}

impl<T: Read> Read for Backing<T> {
    fn read(value: Value, at: &str) -> Result<Backing<T>, Refusal> {
        match value {
            Value::String(name) => Ok(Backing::Node(name)),
            Value::Null => Ok(Backing::Nothing),
            Value::Object(_) => Box::read(value, at).map(Backing::Of),
            _ => Err(wrong_type(at, "object, string or null")),
        }
    }
}

/// Describes alternates.
impl Schema {
    /// One of several types.
    pub(super) fn alternate(&mut self, name: &str, of: &[&str]) -> String {
        let members: Vec<Value> = of.iter().map(|of| json!({ "type": of })).collect();
        self.add(name, |_| json!({ "meta-type": "alternate", "members": members }))
    }
}
