//! The handshake: a client asks what there is, agrees on features and chooses an export.
//!
//! A state machine over bytes: it takes what the client sent and appends what to answer.

use super::context::{self, Contexts};
use super::options::{ContextWish, Fields, InfoWish};
use super::wire::{
    IHAVEOPT, MAX_PAYLOAD, MAX_STRING, NBDMAGIC, OPTION_REPLY_MAGIC, can, handshake, info, opt, rep,
};

/// The longest option data that is looked at.
const MAX_OPTION: usize = 64 << 10;
/// The longest that is skipped; who sends more means no good.
const MAX_SKIPPED: usize = 1 << 20;
/// Options a client may send before it must have chosen.
const MAX_OPTIONS: u32 = 1024;

/// What the handshake tells of an export.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The name that clients choose it by.
    pub name: String,
    /// For people to read.
    pub description: String,
    /// Bytes.
    pub size: u64,
    /// Bits of [`can`], without [`can::DF`], which structured replies bring.
    pub flags: u16,
    /// The size to prefer for requests, a power of two.
    pub preferred_block: u32,
    /// The names of its metadata contexts, by number.
    pub contexts: Vec<String>,
}

/// Why nobody may choose an export just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There are too many connections.
    Busy,
    /// This peer has too many connections.
    PeerBusy,
    /// The server stops.
    ShuttingDown,
}

/// Whether a handshake is to go on encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Security {
    /// There is no TLS.
    #[default]
    Plain,
    /// As the client likes.
    Offered,
    /// It has to, before all else.
    Required,
    /// It does.
    Encrypted,
}

/// What was agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Which of the exports.
    pub export: usize,
    /// Whether replies are structured.
    pub structured: bool,
    /// What the client may ask for the block status of.
    pub contexts: Contexts,
}

/// How it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send the answer, receive more bytes.
    More,
    /// Send the answer, go on with the bytes that are left.
    Again,
    /// Send the answer; what follows is TLS, and in it the handshake goes on.
    StartTls,
    /// Send the answer; requests follow.
    Transmission(Choice),
    /// Send the answer and close: the client wishes so, or broke the protocol as told.
    Close(&'static str),
}

/// The server's side of one handshake.
pub struct Handshake {
    exports: Vec<Facts>,
    refusal: Option<Refusal>,
    security: Security,
    /// The client's flags, once they are there.
    flags: Option<u16>,
    structured: bool,
    /// The export for which the client selected contexts, and which.
    selected: Option<(usize, Contexts)>,
    options: u32,
    /// Bytes of an option too long to look at that are still to come.
    skip: usize,
}

impl Handshake {
    /// A handshake about these exports; the first also answers to the empty name.
    pub fn new(exports: Vec<Facts>, refusal: Option<Refusal>) -> Handshake {
        Handshake {
            exports,
            refusal,
            security: Security::Plain,
            flags: None,
            structured: false,
            selected: None,
            options: 0,
            skip: 0,
        }
    }

    /// The same where there is TLS.
    pub fn with_security(self, security: Security) -> Handshake {
        Handshake { security, ..self }
    }

    /// What the server says first.
    pub fn greeting(&self) -> [u8; 18] {
        let mut bytes = [0; 18];
        bytes[..8].copy_from_slice(&NBDMAGIC.to_be_bytes());
        bytes[8..16].copy_from_slice(&IHAVEOPT.to_be_bytes());
        let flags = handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES;
        bytes[16..].copy_from_slice(&flags.to_be_bytes());
        bytes
    }

    /// Take one message from the front of `input`, append the answer to `output`. Gives the bytes
    /// taken. Every message that is looked at fits in 64 KiB and 16 bytes.
    pub fn advance(&mut self, input: &[u8], output: &mut Vec<u8>) -> (usize, Step) {
        if self.skip > 0 {
            let skipped = self.skip.min(input.len());
            self.skip -= skipped;
            return (skipped, if self.skip > 0 { Step::More } else { Step::Again });
        }
        let mut fields = Fields(input);
        let Some(flags) = self.flags else {
            let Ok(flags) = fields.u32() else { return (0, Step::More) };
            let known = handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES;
            return match u16::try_from(flags) {
                Ok(flags) if flags & !known == 0 => {
                    self.flags = Some(flags);
                    (4, Step::Again)
                }
                _ => (4, Step::Close("unknown client flags")),
            };
        };
        let (Ok(magic), Ok(option), Ok(len)) = (fields.u64(), fields.u32(), fields.u32()) else {
            return (0, Step::More);
        };
        if magic != IHAVEOPT {
            return (16, Step::Close("an option without its magic number"));
        }
        let len = len as usize;
        if len > MAX_OPTION {
            if len > MAX_SKIPPED || option == opt::EXPORT_NAME {
                return (16, Step::Close("an option of absurd length"));
            }
            self.skip = len;
            return (16, self.error(output, option, rep::ERR_TOO_BIG, "the option is too long"));
        }
        let Some(data) = fields.0.get(..len) else { return (0, Step::More) };
        self.options += 1;
        let step = if self.options > MAX_OPTIONS {
            Step::Close("too many options")
        } else if option == opt::EXPORT_NAME {
            self.export_name(data, flags, output)
        } else if flags & handshake::FIXED_NEWSTYLE == 0 {
            Step::Close("an option that is not of the newstyle the client chose")
        } else {
            self.option(option, data, output)
        };
        (16 + len, step)
    }

    fn export_name(&self, name: &[u8], flags: u16, output: &mut Vec<u8>) -> Step {
        if self.refusal.is_some() {
            return Step::Close("no connection can be taken now");
        }
        if self.security == Security::Required {
            return Step::Close("the client wants no TLS, which is required");
        }
        let Some(export) = self.find(name) else {
            return Step::Close("there is no export of that name");
        };
        output.extend(self.exports[export].size.to_be_bytes());
        output.extend(self.transmission_flags(export).to_be_bytes());
        if flags & handshake::NO_ZEROES == 0 {
            output.extend([0; 124]);
        }
        Step::Transmission(self.choice(export))
    }

    fn option(&mut self, option: u32, data: &[u8], output: &mut Vec<u8>) -> Step {
        if option == opt::ABORT {
            reply(output, option, rep::ACK, &[]);
            return Step::Close("the client does not want to go on");
        }
        match self.refusal {
            None => {}
            Some(Refusal::Busy) => {
                let why = "too many connections, try again later";
                return self.error(output, option, rep::ERR_POLICY, why);
            }
            Some(Refusal::PeerBusy) => {
                let why = "too many connections of yours, close one first";
                return self.error(output, option, rep::ERR_POLICY, why);
            }
            Some(Refusal::ShuttingDown) => {
                return self.error(output, option, rep::ERR_SHUTDOWN, "the server is stopping");
            }
        }
        let alone = matches!(option, opt::LIST | opt::STRUCTURED_REPLY | opt::STARTTLS);
        if alone && !data.is_empty() {
            return self.error(output, option, rep::ERR_INVALID, "this option takes no data");
        }
        if self.security == Security::Required && option != opt::STARTTLS {
            let why = "this server speaks TLS only";
            return self.error(output, option, rep::ERR_TLS_REQD, why);
        }
        match option {
            opt::STARTTLS => match self.security {
                Security::Plain => {
                    let why = "there is no TLS here";
                    self.error(output, option, rep::ERR_UNSUP, why)
                }
                Security::Encrypted => {
                    let why = "this is TLS already";
                    self.error(output, option, rep::ERR_INVALID, why)
                }
                Security::Offered | Security::Required => {
                    // Nothing that was agreed on in the clear counts any more.
                    self.security = Security::Encrypted;
                    self.structured = false;
                    self.selected = None;
                    reply(output, option, rep::ACK, &[]);
                    Step::StartTls
                }
            },
            opt::LIST => {
                for export in &self.exports {
                    let name = export.name.as_bytes();
                    let len = (name.len() as u32).to_be_bytes();
                    let about = export.description.as_bytes();
                    reply(output, option, rep::SERVER, &[&len, name, about]);
                }
                ack(output, option)
            }
            opt::STRUCTURED_REPLY => {
                self.structured = true;
                ack(output, option)
            }
            opt::INFO | opt::GO => self.info(option, data, output),
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => self.context(option, data, output),
            _ => self.error(output, option, rep::ERR_UNSUP, "this option is not known here"),
        }
    }

    fn info(&self, option: u32, data: &[u8], output: &mut Vec<u8>) -> Step {
        let Ok(wish) = InfoWish::parse(data) else {
            return self.error(output, option, rep::ERR_INVALID, "the option's lengths disagree");
        };
        let Some(export) = self.find(wish.name) else {
            let why = "there is no export of that name";
            return self.error(output, option, rep::ERR_UNKNOWN, why);
        };
        let facts = &self.exports[export];
        let mut tell = |kind: u16, parts: [&[u8]; 3]| {
            let [one, two, three] = parts;
            reply(output, option, rep::INFO, &[&kind.to_be_bytes(), one, two, three]);
        };
        let flags = self.transmission_flags(export).to_be_bytes();
        tell(info::EXPORT, [&facts.size.to_be_bytes(), &flags, &[]]);
        if wish.wants(info::NAME) {
            tell(info::NAME, [facts.name.as_bytes(), &[], &[]]);
        }
        if wish.wants(info::DESCRIPTION) && !facts.description.is_empty() {
            tell(info::DESCRIPTION, [facts.description.as_bytes(), &[], &[]]);
        }
        if wish.wants(info::BLOCK_SIZE) {
            let preferred = facts.preferred_block.to_be_bytes();
            let most = MAX_PAYLOAD.to_be_bytes();
            tell(info::BLOCK_SIZE, [&1u32.to_be_bytes(), &preferred, &most]);
        }
        reply(output, option, rep::ACK, &[]);
        if option == opt::GO { Step::Transmission(self.choice(export)) } else { Step::Again }
    }

    fn context(&mut self, option: u32, data: &[u8], output: &mut Vec<u8>) -> Step {
        let set = option == opt::SET_META_CONTEXT;
        if set {
            self.selected = None;
        }
        if !self.structured {
            let why = "ask for structured replies first";
            return self.error(output, option, rep::ERR_INVALID, why);
        }
        let Ok(wish) = ContextWish::parse(data) else {
            return self.error(output, option, rep::ERR_INVALID, "the option's lengths disagree");
        };
        let Some(export) = self.find(wish.name) else {
            let why = "there is no export of that name";
            return self.error(output, option, rep::ERR_UNKNOWN, why);
        };
        let mut selected = Contexts::default();
        for (number, name) in self.exports[export].contexts.iter().enumerate() {
            let all = !set && wish.queries.is_empty();
            if all || wish.queries.iter().any(|query| context::is_about(query, name, !set)) {
                let id = if set { context::id(number) } else { 0 };
                let parts: [&[u8]; 2] = [&id.to_be_bytes(), name.as_bytes()];
                reply(output, option, rep::META_CONTEXT, &parts);
                selected.add(number);
            }
        }
        if set {
            self.selected = Some((export, selected));
        }
        ack(output, option)
    }

    fn error(&self, output: &mut Vec<u8>, option: u32, kind: u32, why: &str) -> Step {
        reply(output, option, kind, &[why.as_bytes()]);
        Step::Again
    }

    fn find(&self, name: &[u8]) -> Option<usize> {
        if name.len() > MAX_STRING {
            return None;
        }
        let named = self.exports.iter().position(|export| export.name.as_bytes() == name);
        named.or((name.is_empty() && !self.exports.is_empty()).then_some(0))
    }

    fn transmission_flags(&self, export: usize) -> u16 {
        let df = if self.structured { can::DF } else { 0 };
        self.exports[export].flags | can::HAS_FLAGS | df
    }

    fn choice(&self, export: usize) -> Choice {
        let selected = self.selected.filter(|(of, _)| *of == export);
        let contexts = selected.map(|(_, contexts)| contexts).unwrap_or_default();
        Choice { export, structured: self.structured, contexts }
    }
}

fn reply(output: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    output.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend(option.to_be_bytes());
    output.extend(kind.to_be_bytes());
    output.extend((len as u32).to_be_bytes());
    parts.iter().for_each(|part| output.extend_from_slice(part));
}

fn ack(output: &mut Vec<u8>, option: u32) -> Step {
    reply(output, option, rep::ACK, &[]);
    Step::Again
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(name: &str, size: u64) -> Facts {
        Facts {
            name: name.into(),
            description: "about it".into(),
            size,
            flags: can::FLUSH,
            preferred_block: 4096,
            contexts: context::names([name].into_iter()),
        }
    }

    fn handshake() -> Handshake {
        Handshake::new(vec![facts("a", 1 << 20), facts("b", 2 << 20)], None)
    }

    fn message(option: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = IHAVEOPT.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn go(name: &str, kinds: &[u16]) -> Vec<u8> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend((kinds.len() as u16).to_be_bytes());
        kinds.iter().for_each(|kind| data.extend(kind.to_be_bytes()));
        data
    }

    fn context(name: &str, queries: &[&str]) -> Vec<u8> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend((queries.len() as u32).to_be_bytes());
        for query in queries {
            data.extend((query.len() as u32).to_be_bytes());
            data.extend(query.as_bytes());
        }
        data
    }

    /// Replies as (option, kind, data).
    fn replies(mut bytes: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
        let mut all = vec![];
        while !bytes.is_empty() {
            let mut fields = Fields(bytes);
            assert_eq!(fields.u64().expect("magic"), OPTION_REPLY_MAGIC);
            let (option, kind) = (fields.u32().expect("option"), fields.u32().expect("kind"));
            let len = fields.u32().expect("length") as usize;
            all.push((option, kind, fields.0[..len].to_vec()));
            bytes = &fields.0[len..];
        }
        all
    }

    fn ask(shake: &mut Handshake, option: u32, data: &[u8]) -> (Vec<(u32, u32, Vec<u8>)>, Step) {
        let (bytes, mut output) = (message(option, data), vec![]);
        let (used, step) = shake.advance(&bytes, &mut output);
        assert_eq!(used, bytes.len());
        (replies(&output), step)
    }

    fn begun(flags: u32) -> Handshake {
        let mut shake = handshake();
        assert_eq!(shake.advance(&flags.to_be_bytes(), &mut vec![]), (4, Step::Again));
        shake
    }

    #[test]
    fn go_tells_what_was_asked_and_agrees() {
        let mut shake = begun(3);
        assert_eq!(ask(&mut shake, opt::STRUCTURED_REPLY, &[]).1, Step::Again);
        let (told, _) = ask(&mut shake, opt::SET_META_CONTEXT, &context("b", &["base:allocation"]));
        assert_eq!(told[0].1, rep::META_CONTEXT);
        assert_eq!(told[1].1, rep::ACK);
        let (told, step) = ask(&mut shake, opt::GO, &go("b", &[1, 2, 3, 77]));
        let kinds: Vec<_> = told.iter().map(|told| told.1).collect();
        assert_eq!(kinds, [rep::INFO, rep::INFO, rep::INFO, rep::INFO, rep::ACK]);
        let flags = can::HAS_FLAGS | can::FLUSH | can::DF;
        let mut export = vec![0, 0];
        export.extend((2u64 << 20).to_be_bytes());
        export.extend(flags.to_be_bytes());
        assert_eq!(told[0].2, export);
        assert_eq!(told[1].2, b"\0\x01b");
        assert_eq!(told[2].2, b"\0\x02about it");
        assert_eq!(told[3].2, b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0");
        let mut contexts = Contexts::default();
        contexts.add(0);
        let choice = Choice { export: 1, structured: true, contexts };
        assert_eq!(step, Step::Transmission(choice));
    }

    #[test]
    fn contexts_belong_to_one_export_and_need_structured_replies() {
        let mut shake = begun(3);
        let wish = context("b", &["base:allocation"]);
        assert_eq!(ask(&mut shake, opt::SET_META_CONTEXT, &wish).0[0].1, rep::ERR_INVALID);
        ask(&mut shake, opt::STRUCTURED_REPLY, &[]);
        ask(&mut shake, opt::SET_META_CONTEXT, &wish);
        let (_, step) = ask(&mut shake, opt::GO, &go("a", &[]));
        assert_eq!(
            step,
            Step::Transmission(Choice {
                export: 0,
                structured: true,
                contexts: Contexts::default()
            })
        );
        let count = |shake: &mut Handshake, option, queries: &[&str]| {
            ask(shake, option, &context("", queries)).0.len() - 1
        };
        assert_eq!(count(&mut shake, opt::LIST_META_CONTEXT, &[]), 2);
        assert_eq!(count(&mut shake, opt::LIST_META_CONTEXT, &["base:"]), 1);
        assert_eq!(count(&mut shake, opt::LIST_META_CONTEXT, &["base:x", "q:y"]), 0);
        assert_eq!(count(&mut shake, opt::SET_META_CONTEXT, &["base:allocation"]), 1);
        for none in [&[][..], &["base:"], &[""], &["other:allocation"]] {
            assert_eq!(count(&mut shake, opt::SET_META_CONTEXT, none), 0);
            assert!(shake.selected.is_some_and(|(_, contexts)| contexts.is_empty()));
        }
        let both = ["qemu:dirty-bitmap:a", "base:allocation", "qemu:dirty-bitmap:b"];
        assert_eq!(count(&mut shake, opt::SET_META_CONTEXT, &both), 2);
        let (told, _) = ask(&mut shake, opt::SET_META_CONTEXT, &context("a", &both));
        assert_eq!(told[0].2, b"\0\0\0\x01base:allocation");
        assert_eq!(told[1].2, b"\0\0\0\x02qemu:dirty-bitmap:a");
        let (_, step) = ask(&mut shake, opt::GO, &go("a", &[]));
        let Step::Transmission(choice) = step else { panic!("{step:?}") };
        assert_eq!(choice.contexts.numbers().collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn the_old_option_pads_and_cannot_fail_politely() {
        for (flags, len) in [(1, 134), (3, 10), (0, 134), (2, 10)] {
            let mut output = vec![];
            let (_, step) = begun(flags).advance(&message(opt::EXPORT_NAME, b""), &mut output);
            assert!(matches!(step, Step::Transmission(Choice { export: 0, .. })));
            assert_eq!(output.len(), len);
        }
        let (_, step) = begun(3).advance(&message(opt::EXPORT_NAME, b"c"), &mut vec![]);
        assert!(matches!(step, Step::Close(_)));
    }

    #[test]
    fn what_is_unknown_or_wrong() {
        let mut shake = begun(1);
        for option in [0, opt::STARTTLS, 11, u32::MAX] {
            assert_eq!(ask(&mut shake, option, &[]).0[0].1, rep::ERR_UNSUP);
        }
        assert_eq!(ask(&mut shake, opt::LIST, b"x").0[0].1, rep::ERR_INVALID);
        assert_eq!(ask(&mut shake, opt::GO, b"x").0[0].1, rep::ERR_INVALID);
        assert_eq!(ask(&mut shake, opt::GO, &go("c", &[])).0[0].1, rep::ERR_UNKNOWN);
        assert_eq!(ask(&mut shake, opt::LIST, b"").0.len(), 3);
        let (told, step) = ask(&mut shake, opt::ABORT, b"whatever");
        assert_eq!(told[0].1, rep::ACK);
        assert!(matches!(step, Step::Close(_)));
        let mut output = vec![];
        assert!(matches!(handshake().advance(&[0, 0, 0, 4], &mut output).1, Step::Close(_)));
        assert!(matches!(
            begun(0).advance(&message(opt::LIST, b""), &mut output).1,
            Step::Close(_)
        ));
        assert!(matches!(begun(1).advance(&[9; 16], &mut output).1, Step::Close(_)));
    }

    #[test]
    fn long_options_are_skipped_and_absurd_ones_end_it() {
        let mut shake = begun(1);
        let bytes = message(opt::GO, &vec![0; MAX_OPTION + 1]);
        let mut output = vec![];
        let (used, step) = shake.advance(&bytes, &mut output);
        assert_eq!((used, step), (16, Step::Again));
        assert_eq!(replies(&output)[0].1, rep::ERR_TOO_BIG);
        assert_eq!(shake.advance(&bytes[16..100], &mut output), (84, Step::More));
        assert_eq!(shake.advance(&bytes[100..], &mut output).1, Step::Again);
        assert_eq!(ask(&mut shake, opt::LIST, b"").0.len(), 3);
        let mut absurd = message(opt::GO, &[]);
        absurd[12] = 0xff;
        assert!(matches!(shake.advance(&absurd, &mut output).1, Step::Close(_)));
    }

    #[test]
    fn nothing_but_tls_where_it_is_required() {
        let begun = |security| {
            let mut shake = handshake().with_security(security);
            shake.advance(&[0, 0, 0, 3], &mut vec![]);
            shake
        };
        let mut shake = begun(Security::Required);
        for (option, data) in [
            (opt::LIST, vec![]),
            (opt::STRUCTURED_REPLY, vec![]),
            (opt::INFO, go("a", &[])),
            (opt::GO, go("a", &[])),
            (opt::GO, go("none", &[])),
            (opt::SET_META_CONTEXT, context("a", &["base:allocation"])),
            (77, vec![1]),
        ] {
            let (told, step) = ask(&mut shake, option, &data);
            assert_eq!((told.len(), told[0].1, step), (1, rep::ERR_TLS_REQD, Step::Again));
        }
        assert_eq!(ask(&mut shake, opt::STARTTLS, b"x").0[0].1, rep::ERR_INVALID);
        let (told, step) = ask(&mut shake, opt::STARTTLS, &[]);
        assert_eq!((told[0].1, step), (rep::ACK, Step::StartTls));
        assert_eq!(ask(&mut shake, opt::STARTTLS, &[]).0[0].1, rep::ERR_INVALID);
        assert!(matches!(ask(&mut shake, opt::GO, &go("a", &[])).1, Step::Transmission(_)));
        let (_, step) =
            begun(Security::Required).advance(&message(opt::EXPORT_NAME, b"a"), &mut vec![]);
        assert!(matches!(step, Step::Close(_)));
        let mut shake = begun(Security::Required);
        assert!(matches!(ask(&mut shake, opt::ABORT, &[]).1, Step::Close(_)));
    }

    #[test]
    fn what_was_agreed_on_in_the_clear_is_forgotten() {
        let mut shake = handshake().with_security(Security::Offered);
        shake.advance(&[0, 0, 0, 3], &mut vec![]);
        ask(&mut shake, opt::STRUCTURED_REPLY, &[]);
        ask(&mut shake, opt::SET_META_CONTEXT, &context("a", &["base:allocation"]));
        assert_eq!(ask(&mut shake, opt::STARTTLS, &[]).1, Step::StartTls);
        let (_, step) = ask(&mut shake, opt::GO, &go("a", &[]));
        let Step::Transmission(choice) = step else { panic!("{step:?}") };
        assert!(!choice.structured && choice.contexts.is_empty());
    }

    #[test]
    fn refusals_let_a_client_leave_politely() {
        for (refusal, error) in [
            (Refusal::Busy, rep::ERR_POLICY),
            (Refusal::PeerBusy, rep::ERR_POLICY),
            (Refusal::ShuttingDown, rep::ERR_SHUTDOWN),
        ] {
            let mut shake = Handshake::new(vec![facts("a", 1)], Some(refusal));
            shake.advance(&[0, 0, 0, 3], &mut vec![]);
            assert_eq!(ask(&mut shake, opt::GO, &go("a", &[])).0[0].1, error);
            assert_eq!(ask(&mut shake, opt::ABORT, &[]).0[0].1, rep::ACK);
        }
    }
}
