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
    /// Words by which it is known that a disk lies in this export: its own, and those of what it lies in itself.
    pub lies_in: Vec<String>,
    /// Whether it can be had: the disk has not been stopped.
    pub available: bool,
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
    /// Whether replies come in chunks: structured, or extended.
    pub structured: bool,
    /// Whether the headers of requests and replies are extended.
    pub extended: bool,
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
    extended: bool,
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
            extended: false,
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
        if self.extended {
            return Step::Close("extended headers, and an option that cannot have them");
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
        let alone = matches!(
            option,
            opt::LIST | opt::STRUCTURED_REPLY | opt::STARTTLS | opt::EXTENDED_HEADERS
        );
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
                    self.extended = false;
                    self.selected = None;
                    reply(output, option, rep::ACK, &[]);
                    Step::StartTls
                }
            },
            opt::LIST => {
                for export in self.exports.iter().filter(|export| export.available) {
                    let name = export.name.as_bytes();
                    let len = (name.len() as u32).to_be_bytes();
                    let about = export.description.as_bytes();
                    reply(output, option, rep::SERVER, &[&len, name, about]);
                }
                ack(output, option)
            }
            opt::STRUCTURED_REPLY if self.extended => {
                let why = "extended headers are agreed on already";
                self.error(output, option, rep::ERR_EXT_HEADER_REQD, why)
            }
            opt::EXTENDED_HEADERS if self.extended => {
                self.error(output, option, rep::ERR_INVALID, "that is agreed on already")
            }
            opt::EXTENDED_HEADERS => {
                self.structured = true;
                self.extended = true;
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
        } else if wish.queries.iter().any(|query| *query == context::LIES_IN.as_bytes()) {
            for word in &self.exports[export].lies_in {
                let parts = [&0u32.to_be_bytes(), context::LIES_IN.as_bytes(), word.as_bytes()];
                reply(output, option, rep::META_CONTEXT, &parts);
            }
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
        let found = named.or((name.is_empty() && !self.exports.is_empty()).then_some(0));
        found.filter(|export| self.exports[*export].available)
    }

    fn transmission_flags(&self, export: usize) -> u16 {
        let df = if self.structured { can::DF } else { 0 };
        let choice = self.choice(export);
        let narrow = choice.extended && !choice.contexts.is_empty();
        let narrow = if narrow { can::BLOCK_STATUS_PAYLOAD } else { 0 };
        self.exports[export].flags | can::HAS_FLAGS | df | narrow
    }

    fn choice(&self, export: usize) -> Choice {
        let selected = self.selected.filter(|(of, _)| *of == export);
        let contexts = selected.map(|(_, contexts)| contexts).unwrap_or_default();
        Choice { export, structured: self.structured, extended: self.extended, contexts }
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
mod tests;
