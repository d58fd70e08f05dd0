//! Messages of the FUSE device made of arbitrary bytes, for fuzz targets.

use std::sync::Arc;

use ringtap_io::Mem;
use ringtap_vbd::{Kind, Vbd};

use super::request::{Answer, Asked, Facts, understand};
use super::shown::Shown;
use super::wire::{Head, Init, u32_at};

/// The most that one read or write may move.
pub const MOST: usize = 64 << 10;

/// How the file is shown.
#[derive(Clone, Copy, Debug)]
pub struct Shows {
    /// Nobody may write.
    pub read_only: bool,
    /// It grows where somebody writes behind its end.
    pub growable: bool,
    /// A write brings as many bytes as it says, whatever follows in the message.
    pub honest: bool,
}

/// Understand a message that begins with its header; gives whether it was a request for the device.
///
/// # Panics
/// Where it reaches past the disk or the memory there is for it: that is what is being looked for.
pub fn understand_message(message: &[u8], vbd: &Vbd, shows: Shows) -> bool {
    if let Some(init) = Init::parse(message) {
        assert!(init.answer(16, MOST as u32).len() < 256);
    }
    let Some(head) = Head::parse(message) else { return false };
    let arguments = message.get(super::wire::IN_HEADER..).unwrap_or_default();
    let said = u32_at(arguments, 16).unwrap_or(0) as usize;
    let carried = if shows.honest { said } else { arguments.len().saturating_sub(40) };
    // SAFETY: the memory is only measured here, never touched.
    let memory = |len: usize| unsafe { Mem::from_raw(std::ptr::null_mut(), len.min(MOST)) };
    let Shows { read_only, growable, .. } = shows;
    let shown = Arc::new(Shown::new(vbd, None));
    let facts = Facts { read_only, growable, mode: 0o600, uid: 0, gid: 0, shown };
    match understand(head, arguments, carried, memory, vbd, &facts) {
        Asked::Device(request, answer) => {
            let end = request.offset.checked_add(request.len);
            assert!(end.is_some_and(|end| end <= vbd.size()), "{request:?}");
            if matches!(request.kind, Kind::Read | Kind::Write) {
                assert_eq!(request.mem.len() as u64, request.len);
            }
            match answer {
                Answer::Data(len) => assert!(len <= MOST),
                Answer::Written(len) => assert!(len as usize <= MOST),
                Answer::Empty => {}
            }
            true
        }
        Asked::Failed(errno) => {
            assert!((1..4096).contains(&errno), "{errno}");
            false
        }
        Asked::Answer(_) | Asked::Seek { .. } | Asked::Nothing => false,
    }
}
