//! Messages of a vhost-user front-end, as they come: whatever it says, with whatever descriptors, each message that
//! wants a reply gets one, and what it started ends.
//!
//! The input: bit 0 of the first byte says whether the features are agreed on first; then messages, as
//! `converse` takes them.

use ringtap_export::vhost_user::talk::{BEGIN, converse};

#[test]
fn front_end() {
    bolero::check!().for_each(|input: &[u8]| {
        let [first, messages @ ..] = input else { return };
        if first & 1 != 0 {
            converse(&[&BEGIN[..], messages].concat());
        } else {
            converse(messages);
        }
    });
}
