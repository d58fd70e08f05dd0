//! What programs say in JSON.

use serde_json::{Deserializer, Value};

/// What stands under that name, wherever in the values that a text begins with.
pub fn members(text: &str, name: &str) -> Vec<Value> {
    let values = Deserializer::from_str(text).into_iter().map_while(Result::ok);
    let mut found = Vec::new();
    values.for_each(|value| find(&value, name, &mut found));
    found
}

fn find(value: &Value, name: &str, found: &mut Vec<Value>) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                if key == name {
                    found.push(value.clone());
                }
                find(value, name, found);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| find(value, name, found)),
        _ => {}
    }
}
