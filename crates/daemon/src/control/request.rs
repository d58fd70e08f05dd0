//! A command as a client writes it.

use serde_json::{Map, Value};

use super::refusal::Refusal;

/// A command, with what its reply is known by.
#[derive(Debug, PartialEq)]
pub(crate) struct Request {
    pub(crate) command: String,
    pub(crate) arguments: Map<String, Value>,
    pub(crate) id: Option<Value>,
}

impl Request {
    /// Take a value for a command; where it is none, the reply's `id` and why.
    pub(crate) fn of(value: Value) -> Result<Request, (Option<Value>, Refusal)> {
        let Value::Object(mut members) = value else {
            return Err((None, Refusal::new("QMP input must be a JSON object")));
        };
        let id = members.remove("id");
        let refuse = |text: String| Err((id.clone(), Refusal::new(text)));
        let (mut command, mut arguments) = (None, Map::new());
        for (name, value) in members {
            match (&*name, value) {
                ("execute", Value::String(text)) => command = Some(text),
                ("execute", _) => {
                    return refuse(format!("QMP input member '{name}' must be a string"));
                }
                ("arguments", Value::Object(given)) => arguments = given,
                ("arguments", _) => {
                    return refuse(format!("QMP input member '{name}' must be an object"));
                }
                // `exec-oob` too: that capability is not offered.
                _ => return refuse(format!("QMP input member '{name}' is unexpected")),
            }
        }
        match command {
            Some(command) => Ok(Request { command, arguments, id }),
            None => refuse("QMP input lacks member 'execute'".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_command_is_an_object_of_known_members() {
        let request = Request::of(json!({"execute": "quit", "id": [1], "arguments": {"a": 1}}));
        let request = request.expect("a command");
        assert_eq!((&*request.command, request.id), ("quit", Some(json!([1]))));
        assert_eq!(request.arguments.len(), 1);
        for (wrong, said) in [
            (json!([]), "must be a JSON object"),
            (json!({"id": 1}), "lacks member 'execute'"),
            (json!({"execute": 1, "id": 1}), "'execute' must be a string"),
            (json!({"execute": "x", "arguments": [], "id": 1}), "'arguments' must be an object"),
            (json!({"execute": "x", "foo": 1, "id": 1}), "'foo' is unexpected"),
            (json!({"exec-oob": "x", "id": 1}), "'exec-oob' is unexpected"),
        ] {
            let (id, refusal) = Request::of(wrong.clone()).expect_err(said);
            assert!(refusal.text.contains(said), "{refusal:?}");
            assert_eq!(id.is_some(), wrong.is_object(), "{wrong}");
        }
    }
}
