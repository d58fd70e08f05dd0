//! What commands take and answer: each type is described once, and reads, writes and explains itself by that.
//!
//! A description names members as the wire does. From it come the checks of what a client sends, in the words
//! that QEMU's clients know, and what `query-qmp-schema` says.

use serde_json::{Map, Number, Value, json};

use super::refusal::Refusal;
use super::schema::{Members, Schema, Shape};

/// A type that clients send.
pub(crate) trait Read: Shape {
    /// The value at that place of the arguments.
    fn read(value: Value, at: &str) -> Result<Self, Refusal>;

    /// What a member that is not there stands for.
    fn absent(at: &str) -> Result<Self, Refusal> {
        Err(Refusal::new(format!("Parameter '{at}' is missing")))
    }
}

/// A type that is answered.
pub(crate) trait Write: Shape {
    /// Nothing: the member is left out.
    fn write(self) -> Option<Value>;
}

/// A type with members that clients send.
pub(crate) trait Take: Members {
    /// Take its own members out of what a client sent.
    fn take(from: &mut Map<String, Value>, at: &str) -> Result<Self, Refusal>;
}

/// The place of a member of what is at a place.
pub(crate) fn within(at: &str, name: &str) -> String {
    if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") }
}

/// Take one member.
pub(crate) fn member<T: Read>(
    from: &mut Map<String, Value>,
    name: &str,
    at: &str,
) -> Result<T, Refusal> {
    let at = within(at, name);
    match from.remove(name) {
        Some(value) => T::read(value, &at),
        None => T::absent(&at),
    }
}

/// All of an object must have been taken.
pub(crate) fn whole<T: Take>(mut from: Map<String, Value>, at: &str) -> Result<T, Refusal> {
    let taken = T::take(&mut from, at)?;
    match from.keys().next() {
        None => Ok(taken),
        Some(name) => Err(Refusal::new(format!("Parameter '{}' is unexpected", within(at, name)))),
    }
}

/// Read an object.
pub(crate) fn object<T: Take>(value: Value, at: &str) -> Result<T, Refusal> {
    match value {
        Value::Object(members) => whole(members, at),
        _ => Err(wrong_type(at, "object")),
    }
}

pub(crate) fn wrong_type(at: &str, wanted: &str) -> Refusal {
    Refusal::new(format!("Invalid parameter type for '{at}', expected: {wanted}"))
}

/// A word that is none of those that are known.
pub(crate) fn wrong_word(at: &str, word: &str) -> Refusal {
    Refusal::new(format!("Parameter '{at}' does not accept value '{word}'"))
}

/// A description of what clients send.
macro_rules! arguments {
    ($(#[$about:meta])* struct $Name:ident { $($(#[$of:meta])* $key:literal $field:ident: $Type:ty),* $(,)? }) => {
        $(#[$about])*
        #[derive(Debug)]
        pub(crate) struct $Name { $($(#[$of])* pub(crate) $field: $Type),* }
        $crate::control::shape::described!($Name { $($key: $Type),* });
        impl $crate::control::shape::Take for $Name {
            #[allow(unused_variables)] // where there is no member
            fn take(
                from: &mut serde_json::Map<String, serde_json::Value>,
                at: &str,
            ) -> Result<Self, $crate::control::refusal::Refusal> {
                Ok($Name { $($field: $crate::control::shape::member(from, $key, at)?),* })
            }
        }
        impl $crate::control::shape::Read for $Name {
            fn read(
                value: serde_json::Value,
                at: &str,
            ) -> Result<Self, $crate::control::refusal::Refusal> {
                $crate::control::shape::object(value, at)
            }
        }
    };
}

/// A description of what is answered, or told in an event.
macro_rules! answer {
    ($(#[$about:meta])* struct $Name:ident { $($(#[$of:meta])* $key:literal $field:ident: $Type:ty),* $(,)? }) => {
        $(#[$about])*
        #[derive(Debug)]
        pub(crate) struct $Name { $($(#[$of])* pub(crate) $field: $Type),* }
        $crate::control::shape::described!($Name { $($key: $Type),* });
        impl $crate::control::shape::Write for $Name {
            fn write(self) -> Option<serde_json::Value> {
                #[allow(unused_mut)] // where there is no member
                let mut members = serde_json::Map::new();
                $(
                    let value = $crate::control::shape::Write::write(self.$field);
                    members.extend(value.map(|value| ($key.to_owned(), value)));
                )*
                Some(members.into())
            }
        }
    };
}

macro_rules! described {
    ($Name:ident { $($key:literal: $Type:ty),* }) => {
        impl $crate::control::schema::Members for $Name {
            #[allow(unused_variables)] // where there is no member
            fn members(schema: &mut $crate::control::schema::Schema) -> Vec<serde_json::Value> {
                vec![$(schema.member::<$Type>($key)),*]
            }
        }
        impl $crate::control::schema::Shape for $Name {
            fn shape(schema: &mut $crate::control::schema::Schema) -> String {
                schema.object::<Self>(stringify!($Name))
            }
        }
    };
}

/// A description of a word that is one of several.
macro_rules! words {
    ($(#[$about:meta])* enum $Name:ident { $($(#[$of:meta])* $word:literal $Variant:ident),* $(,)? }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $Name { $($(#[$of])* $Variant),* }
        impl $Name {
            /// As the wire has it.
            #[allow(dead_code)] // of those that clients alone send
            pub(crate) fn word(self) -> &'static str {
                match self { $($Name::$Variant => $word),* }
            }
        }
        impl $crate::control::schema::Shape for $Name {
            fn shape(schema: &mut $crate::control::schema::Schema) -> String {
                schema.words(stringify!($Name), &[$($word),*])
            }
        }
        impl $crate::control::shape::Read for $Name {
            fn read(
                value: serde_json::Value,
                at: &str,
            ) -> Result<Self, $crate::control::refusal::Refusal> {
                match String::read(value, at)?.as_str() {
                    $($word => Ok($Name::$Variant),)*
                    other => Err($crate::control::shape::wrong_word(at, other)),
                }
            }
        }
        impl $crate::control::shape::Write for $Name {
            fn write(self) -> Option<serde_json::Value> {
                Some(self.word().into())
            }
        }
    };
}

/// A description of what clients send where one member, a word, says which others there are.
macro_rules! choice {
    (
        $(#[$about:meta])*
        struct $Name:ident { $($(#[$of:meta])* $key:literal $field:ident: $Type:ty),* $(,)? }
        $tag:literal enum $Of:ident { $($word:literal $Variant:ident($Members:ty)),* $(,)? }
    ) => {
        $(#[$about])*
        #[derive(Debug)]
        pub(crate) struct $Name {
            $($(#[$of])* pub(crate) $field: $Type,)*
            /// What the word says, with the members that are there for it.
            pub(crate) of: $Of,
        }
        #[doc = concat!("What `", $tag, "` says.")]
        #[derive(Debug)]
        pub(crate) enum $Of { $(#[doc = concat!("`", $word, "`.")] $Variant($Members)),* }
        impl $crate::control::schema::Shape for $Name {
            fn shape(schema: &mut $crate::control::schema::Schema) -> String {
                schema.choice(stringify!($Name), |schema| {
                    let tag = schema.words(stringify!($Of), &[$($word),*]);
                    let mut members = vec![serde_json::json!({ "name": $tag, "type": tag })];
                    members.extend(Vec::<serde_json::Value>::from([$(schema.member::<$Type>($key)),*]));
                    let variants = vec![$(serde_json::json!({
                        "case": $word,
                        "type": <$Members as $crate::control::schema::Shape>::shape(schema),
                    })),*];
                    (members, $tag, variants)
                })
            }
        }
        impl $crate::control::schema::Members for $Name {
            fn members(_: &mut $crate::control::schema::Schema) -> Vec<serde_json::Value> {
                vec![]
            }
        }
        impl $crate::control::shape::Take for $Name {
            fn take(
                from: &mut serde_json::Map<String, serde_json::Value>,
                at: &str,
            ) -> Result<Self, $crate::control::refusal::Refusal> {
                use $crate::control::shape::{Take, member, within, wrong_word};
                let word: String = member(from, $tag, at)?;
                $(let $field = member(from, $key, at)?;)*
                let of = match word.as_str() {
                    $($word => $Of::$Variant(<$Members as Take>::take(from, at)?),)*
                    other => return Err(wrong_word(&within(at, $tag), other)),
                };
                Ok($Name { $($field,)* of })
            }
        }
        impl $crate::control::shape::Read for $Name {
            fn read(
                value: serde_json::Value,
                at: &str,
            ) -> Result<Self, $crate::control::refusal::Refusal> {
                $crate::control::shape::object(value, at)
            }
        }
    };
}

pub(crate) use {answer, arguments, choice, described, words};

answer! {
    /// That it was done.
    struct Done {}
}

impl Shape for bool {
    fn shape(schema: &mut Schema) -> String {
        schema.builtin("bool", "boolean")
    }
}

impl Read for bool {
    fn read(value: Value, at: &str) -> Result<bool, Refusal> {
        value.as_bool().ok_or_else(|| wrong_type(at, "boolean"))
    }
}

impl Write for bool {
    fn write(self) -> Option<Value> {
        Some(self.into())
    }
}

impl Shape for String {
    fn shape(schema: &mut Schema) -> String {
        schema.builtin("str", "string")
    }
}

impl Read for String {
    fn read(value: Value, at: &str) -> Result<String, Refusal> {
        match value {
            Value::String(text) => Ok(text),
            _ => Err(wrong_type(at, "string")),
        }
    }
}

impl Write for String {
    fn write(self) -> Option<Value> {
        Some(self.into())
    }
}

impl Shape for Value {
    fn shape(schema: &mut Schema) -> String {
        schema.builtin("any", "value")
    }
}

impl Read for Value {
    fn read(value: Value, _: &str) -> Result<Value, Refusal> {
        Ok(value)
    }
}

impl Write for Value {
    fn write(self) -> Option<Value> {
        Some(self)
    }
}

macro_rules! whole_numbers {
    ($($Type:ty),*) => {
        $(
            impl Shape for $Type {
                fn shape(schema: &mut Schema) -> String {
                    schema.builtin("int", "int")
                }
            }

            impl Read for $Type {
                fn read(value: Value, at: &str) -> Result<$Type, Refusal> {
                    let Value::Number(number) = value else { return Err(wrong_type(at, "integer")) };
                    let wide = number.as_u64().map(i128::from).or(number.as_i64().map(i128::from));
                    let wide = wide.ok_or_else(|| wrong_type(at, "integer"))?;
                    wide.try_into().map_err(|_| {
                        let (least, most) = (<$Type>::MIN, <$Type>::MAX);
                        Refusal::new(format!("Parameter '{at}' expects an integer of {least} to {most}"))
                    })
                }
            }

            impl Write for $Type {
                fn write(self) -> Option<Value> {
                    Some(Number::from(self).into())
                }
            }
        )*
    };
}

whole_numbers!(u16, u32, u64, i64);

impl<T: Shape> Shape for Option<T> {
    const OPTIONAL: bool = true;

    fn shape(schema: &mut Schema) -> String {
        T::shape(schema)
    }
}

impl<T: Read> Read for Option<T> {
    fn read(value: Value, at: &str) -> Result<Option<T>, Refusal> {
        T::read(value, at).map(Some)
    }

    fn absent(_: &str) -> Result<Option<T>, Refusal> {
        Ok(None)
    }
}

impl<T: Write> Write for Option<T> {
    fn write(self) -> Option<Value> {
        self.and_then(Write::write)
    }
}

impl<T: Shape> Shape for Vec<T> {
    fn shape(schema: &mut Schema) -> String {
        let element = T::shape(schema);
        schema.list(&element)
    }
}

impl<T: Read> Read for Vec<T> {
    fn read(value: Value, at: &str) -> Result<Vec<T>, Refusal> {
        let Value::Array(elements) = value else { return Err(wrong_type(at, "array")) };
        let elements = elements.into_iter().enumerate();
        elements.map(|(place, value)| T::read(value, &format!("{at}[{place}]"))).collect()
    }
}

impl<T: Write> Write for Vec<T> {
    fn write(self) -> Option<Value> {
        Some(json!(self.into_iter().filter_map(Write::write).collect::<Vec<Value>>()))
    }
}

impl<T: Shape> Shape for Box<T> {
    const OPTIONAL: bool = T::OPTIONAL;

    fn shape(schema: &mut Schema) -> String {
        T::shape(schema)
    }
}

impl<T: Read> Read for Box<T> {
    fn read(value: Value, at: &str) -> Result<Box<T>, Refusal> {
        T::read(value, at).map(Box::new)
    }

    fn absent(at: &str) -> Result<Box<T>, Refusal> {
        T::absent(at).map(Box::new)
    }
}

impl<T: Write> Write for Box<T> {
    fn write(self) -> Option<Value> {
        (*self).write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    words! {
        enum Colour { "red" Red, "blue" Blue }
    }
    arguments! {
        struct Point { "x" x: i64, "y-axis" y: Option<u16> }
    }
    arguments! {
        struct Line { "from" from: Point, "names" names: Option<Vec<String>> }
    }
    choice! {
        struct Drawn { "colour" colour: Colour }
        "kind" enum Kind { "point" Point(Point), "line" Line(Line) }
    }

    fn read(value: Value) -> Result<Drawn, String> {
        Drawn::read(value, "").map_err(|refusal| refusal.text)
    }

    #[test]
    fn what_is_described_is_taken_and_nothing_else() {
        let drawn = read(json!({"kind": "point", "colour": "red", "x": -1, "y-axis": 65535}));
        let drawn = drawn.expect("a point");
        assert_eq!(drawn.colour, Colour::Red);
        let Kind::Point(point) = drawn.of else { panic!("{drawn:?}") };
        assert_eq!((point.x, point.y), (-1, Some(65535)));
        let line =
            read(json!({"kind": "line", "colour": "blue", "from": {"x": 1}, "names": ["a"]}));
        let Kind::Line(line) = line.expect("a line").of else { panic!("it is a line") };
        assert_eq!((line.from.x, line.names), (1, Some(vec!["a".to_owned()])));
        for (wrong, said) in [
            (json!([]), "Invalid parameter type for '', expected: object"),
            (json!({"colour": "red"}), "Parameter 'kind' is missing"),
            (json!({"kind": "x", "colour": "red"}), "Parameter 'kind' does not accept value 'x'"),
            (
                json!({"kind": "point", "colour": "x"}),
                "Parameter 'colour' does not accept value 'x'",
            ),
            (json!({"kind": "point", "colour": "red"}), "Parameter 'x' is missing"),
            (
                json!({"kind": "point", "colour": "red", "x": 1.5}),
                "Invalid parameter type for 'x', expected: integer",
            ),
            (
                json!({"kind": "point", "colour": "red", "x": 1, "y-axis": -1}),
                "Parameter 'y-axis' expects an integer of 0 to 65535",
            ),
            (
                json!({"kind": "point", "colour": "red", "x": 1, "y-axis": null}),
                "Invalid parameter type for 'y-axis', expected: integer",
            ),
            (
                json!({"kind": "point", "colour": "red", "x": 1, "from": {}}),
                "Parameter 'from' is unexpected",
            ),
            (
                json!({"kind": "line", "colour": "red", "from": {"x": 1, "z": 1}}),
                "Parameter 'from.z' is unexpected",
            ),
            (
                json!({"kind": "line", "colour": "red", "from": {"x": 1}, "names": ["", 1]}),
                "Invalid parameter type for 'names[1]', expected: string",
            ),
        ] {
            assert_eq!(read(wrong).expect_err(said), said);
        }
    }

    #[test]
    fn what_is_described_is_in_the_schema() {
        let mut schema = Schema::default();
        let name = Drawn::shape(&mut schema);
        let all = schema.into_values();
        let of = |name: &str| all.iter().find(|one| one["name"] == name).expect(name);
        let drawn = of(&name);
        assert_eq!((&drawn["meta-type"], &drawn["tag"]), (&json!("object"), &json!("kind")));
        assert_eq!(drawn["variants"].as_array().map(Vec::len), Some(2));
        let point = &drawn["variants"][0];
        assert_eq!(point["case"], "point");
        let members = &of(point["type"].as_str().expect("a name"))["members"];
        let wanted = json!([{"name": "x", "type": "int"}, {"name": "y-axis", "type": "int", "default": null}]);
        assert_eq!(members, &wanted);
    }
}
