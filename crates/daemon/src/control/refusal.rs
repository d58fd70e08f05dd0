//! Why a command was not carried out, as QMP says it.

use serde_json::{Value, json};

use crate::sandbox;

/// The error of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) class: &'static str,
    pub(crate) text: String,
}

impl Refusal {
    /// Of no class of its own, as most are.
    pub(crate) fn new(text: impl Into<String>) -> Refusal {
        Refusal { class: "GenericError", text: text.into() }
    }

    /// There is no such command, or not now.
    pub(crate) fn no_command(text: impl Into<String>) -> Refusal {
        Refusal { class: "CommandNotFound", text: text.into() }
    }

    /// There is no such disk.
    pub(crate) fn no_device(text: impl Into<String>) -> Refusal {
        Refusal { class: "DeviceNotFound", text: text.into() }
    }

    pub(crate) fn into_value(self) -> Value {
        json!({ "class": self.class, "desc": sandbox::hinted(self.text) })
    }
}

impl From<crate::Error> for Refusal {
    fn from(error: crate::Error) -> Refusal {
        Refusal::new(error.to_string())
    }
}
