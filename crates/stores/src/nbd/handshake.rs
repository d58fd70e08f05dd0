//! What client and server agree on before the first request.

use std::io::{self, Read, Write};

use super::wire::{
    IHAVEOPT, MAX_PAYLOAD, MAX_STRING, NBDMAGIC, OPTION_REPLY_MAGIC, can, handshake, info, opt, rep,
};

/// The second magic of servers without options.
const OLD_STYLE: u64 = 0x0000_4202_8186_1253;
/// The most that a reply to an option may hold.
const MAX_REPLY: u32 = 64 << 10;
/// The most replies to one option: each says something of its own.
const REPLIES: usize = 64;
/// Of what a server prefers more is not passed on.
const MOST_PREFERRED: u32 = 1 << 20;
/// The context that tells where there are holes.
pub const ALLOCATION: &str = "base:allocation";
/// Contexts by which a server of Ringtap's tells what an export lies in: this, and a word.
pub const LIES_IN: &str = "x-ringtap:lies-in:";
/// The longest of such words.
const MOST_WORD: usize = 64;

/// How replies come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replies {
    /// A head, and the data of a read behind it.
    Simple,
    /// In chunks.
    Structured,
    /// In chunks, requests and chunks with 64-bit lengths.
    Extended,
}

/// What was agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Bytes of the export.
    pub size: u64,
    /// Its transmission flags.
    pub can: u16,
    /// What offsets and lengths are multiples of.
    pub block: u32,
    /// What they had better be multiples of.
    pub preferred: u32,
    /// The most bytes that a request moves.
    pub most: u32,
    /// How replies come.
    pub replies: Replies,
    /// The number of the context that is asked for, [`ALLOCATION`] as a rule.
    pub status: Option<u32>,
}

impl Agreed {
    /// Whether the export can do that.
    pub fn can(&self, flag: u16) -> bool {
        self.can & flag != 0
    }

    /// Whether a connection with these facts serves as one with those did.
    pub fn goes_on_from(&self, former: &Agreed) -> Result<(), String> {
        if self.size < former.size {
            return Err(format!("it had {} bytes and has {} now", former.size, self.size));
        }
        if self.can(can::READ_ONLY) && !former.can(can::READ_ONLY) {
            return Err("it takes no writes any more".into());
        }
        let same = self.replies == former.replies && self.status == former.status;
        let lost = former.can & !self.can & !can::READ_ONLY;
        if !same || lost != 0 || self.block > former.block || self.most < former.most {
            return Err(
                "the server speaks with us in another way than before, or can do less".into()
            );
        }
        Ok(())
    }
}

/// Why there was no agreement.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Os(#[from] io::Error),
    /// It is none of ours, or breaks the protocol.
    #[error("{0}")]
    Protocol(String),
    /// The server has another wish.
    #[error("{0}")]
    Refused(String),
}

fn protocol(what: impl Into<String>) -> Error {
    Error::Protocol(what.into())
}

fn read<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |it| u32::from_be_bytes(it.try_into().unwrap_or_default()))
}

/// Greet each other; whether the server knows options as they are today.
pub fn greet(stream: &mut (impl Read + Write)) -> Result<(), Error> {
    if u64::from_be_bytes(read(stream)?) != NBDMAGIC {
        return Err(protocol("what listens there is no NBD server"));
    }
    match u64::from_be_bytes(read(stream)?) {
        IHAVEOPT => {}
        OLD_STYLE => {
            return Err(protocol("the server speaks NBD's old style, which is not supported"));
        }
        _ => return Err(protocol("what listens there is no NBD server")),
    }
    let flags = u16::from_be_bytes(read(stream)?);
    if flags & handshake::FIXED_NEWSTYLE == 0 {
        return Err(protocol("the server does not speak NBD's fixed newstyle, which is needed"));
    }
    let ours = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    stream.write_all(&u32::from(ours).to_be_bytes())?;
    if flags & handshake::NO_ZEROES == 0 {
        return Err(protocol(
            "the server sends 124 zeros that nobody needs: it is older than 2013",
        ));
    }
    Ok(())
}

/// A reply to an option.
struct Reply {
    kind: u32,
    data: Vec<u8>,
}

impl Reply {
    fn is_error(&self) -> bool {
        self.kind & 1 << 31 != 0
    }

    /// What the server says of it, where it says anything.
    fn text(&self) -> String {
        let text: String = String::from_utf8_lossy(&self.data).chars().take(200).collect();
        let text: String = text.chars().filter(|c| !c.is_control()).collect();
        if text.is_empty() { text } else { format!(" (\"{text}\")") }
    }
}

fn ask(stream: &mut impl Write, option: u32, data: &[u8]) -> Result<(), Error> {
    let mut bytes = IHAVEOPT.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    stream.write_all(&bytes)?;
    stream.flush()?;
    Ok(())
}

fn reply(stream: &mut impl Read, option: u32) -> Result<Reply, Error> {
    let head: [u8; 20] = read(stream)?;
    let magic = u64::from(word(&head, 0)) << 32 | u64::from(word(&head, 4));
    if magic != OPTION_REPLY_MAGIC || word(&head, 8) != option {
        return Err(protocol(
            "the server breaks the protocol: no reply to the option that was asked",
        ));
    }
    let len = word(&head, 16);
    if len > MAX_REPLY {
        return Err(protocol(format!("the server breaks the protocol: a reply of {len} bytes")));
    }
    let mut data = vec![0; len as usize];
    stream.read_exact(&mut data)?;
    Ok(Reply { kind: word(&head, 12), data })
}

/// Ask for encryption; it begins behind this.
pub fn start_tls(stream: &mut (impl Read + Write)) -> Result<(), Error> {
    ask(stream, opt::STARTTLS, &[])?;
    let answer = reply(stream, opt::STARTTLS)?;
    match answer.kind {
        rep::ACK => Ok(()),
        _ => Err(Error::Refused(format!(
            "the server does not speak TLS{}: nbd:// is not encrypted",
            answer.text()
        ))),
    }
}

/// Agree on an export, and on the context that tells what ranges of it hold. Gives what the server says that it lies in, too.
pub fn agree(
    stream: &mut (impl Read + Write),
    export: &str,
    status: &str,
) -> Result<(Agreed, Vec<String>), Error> {
    if export.len() > MAX_STRING {
        return Err(protocol("the export's name is too long"));
    }
    let mut replies = Replies::Simple;
    for (option, then) in
        [(opt::EXTENDED_HEADERS, Replies::Extended), (opt::STRUCTURED_REPLY, Replies::Structured)]
    {
        ask(stream, option, &[])?;
        let answer = reply(stream, option)?;
        if answer.kind == rep::ACK {
            replies = then;
            break;
        }
        refused_for_good(&answer, export)?;
    }
    let status = match replies {
        Replies::Simple => None,
        _ => context(stream, export, status)?,
    };
    let lies_in = match replies {
        Replies::Simple => vec![],
        _ => lies_in(stream, export)?,
    };
    let mut agreed =
        Agreed { size: 0, can: 0, block: 1, preferred: 4096, most: MAX_PAYLOAD, replies, status };
    let mut data = named(export);
    data.extend(1u16.to_be_bytes());
    data.extend(info::BLOCK_SIZE.to_be_bytes());
    ask(stream, opt::GO, &data)?;
    let mut known = false;
    for _ in 0..REPLIES {
        let answer = reply(stream, opt::GO)?;
        match answer.kind {
            rep::ACK if known => return Ok((agreed, lies_in)),
            rep::ACK => return Err(protocol("the server does not say how large the export is")),
            rep::INFO => known |= learn(&mut agreed, &answer.data)?,
            rep::ERR_UNSUP => return Ok((by_name(stream, export, agreed)?, lies_in)),
            _ if answer.is_error() => return Err(refusal(&answer, export)),
            _ => {}
        }
    }
    Err(protocol("the server breaks the protocol: it does not come to an end"))
}

/// A name with its length before it.
fn named(name: &str) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data
}

/// Note what a piece of information says; whether it is the one that must come.
fn learn(agreed: &mut Agreed, data: &[u8]) -> Result<bool, Error> {
    let Some(kind) = data.first_chunk::<2>() else {
        return Err(protocol("the server breaks the protocol: information without a kind"));
    };
    match u16::from_be_bytes(*kind) {
        info::EXPORT if data.len() == 12 => {
            agreed.size = u64::from(word(data, 2)) << 32 | u64::from(word(data, 6));
            if agreed.size > i64::MAX as u64 {
                return Err(protocol(format!("an export of {} bytes makes no sense", agreed.size)));
            }
            agreed.can = u16::from_be_bytes([data[10], data[11]]);
            Ok(true)
        }
        info::BLOCK_SIZE if data.len() == 14 => {
            let (block, preferred, most) = (word(data, 2), word(data, 6), word(data, 10));
            let is_size = |it: u32| it.is_power_of_two() && it <= 64 << 10;
            if !is_size(block) || most < block || most % block != 0 && most != u32::MAX {
                return Err(protocol(format!(
                    "the server's blocks of {block} to {most} bytes make no sense"
                )));
            }
            agreed.block = block;
            let preferred = preferred.min(MOST_PREFERRED);
            agreed.preferred =
                if preferred.is_power_of_two() { preferred.max(block) } else { block };
            agreed.most = most.min(MAX_PAYLOAD);
            Ok(false)
        }
        info::EXPORT | info::BLOCK_SIZE => {
            Err(protocol("the server breaks the protocol: information of a wrong length"))
        }
        _ => Ok(false),
    }
}

/// Have a context told of, where the server has it.
fn context(
    stream: &mut (impl Read + Write),
    export: &str,
    name: &str,
) -> Result<Option<u32>, Error> {
    let mut data = named(export);
    data.extend(1u32.to_be_bytes());
    data.extend(named(name));
    ask(stream, opt::SET_META_CONTEXT, &data)?;
    let mut number = None;
    for _ in 0..REPLIES {
        let answer = reply(stream, opt::SET_META_CONTEXT)?;
        match answer.kind {
            rep::ACK => return Ok(number),
            rep::META_CONTEXT if answer.data.get(4..) == Some(name.as_bytes()) => {
                number = Some(word(&answer.data, 0));
            }
            _ if answer.is_error() => {
                refused_for_good(&answer, export)?;
                return Ok(None);
            }
            _ => {}
        }
    }
    Err(protocol("the server breaks the protocol: it does not come to an end"))
}

/// Ask a server of Ringtap's what the export lies in; others know of no such contexts.
fn lies_in(stream: &mut (impl Read + Write), export: &str) -> Result<Vec<String>, Error> {
    let mut data = named(export);
    data.extend(1u32.to_be_bytes());
    data.extend(named(LIES_IN));
    ask(stream, opt::LIST_META_CONTEXT, &data)?;
    let mut found = vec![];
    for _ in 0..REPLIES {
        let answer = reply(stream, opt::LIST_META_CONTEXT)?;
        match answer.kind {
            rep::ACK => return Ok(found),
            rep::META_CONTEXT => {
                let name = answer.data.get(4..).and_then(|name| std::str::from_utf8(name).ok());
                let word = name.and_then(|name| name.strip_prefix(LIES_IN));
                found.extend(word.filter(|word| word.len() <= MOST_WORD).map(str::to_owned));
            }
            _ if answer.is_error() => {
                refused_for_good(&answer, export)?;
                return Ok(vec![]);
            }
            _ => {}
        }
    }
    Err(protocol("the server breaks the protocol: it does not come to an end"))
}

/// As before there was [`opt::GO`].
fn by_name(
    stream: &mut (impl Read + Write),
    export: &str,
    agreed: Agreed,
) -> Result<Agreed, Error> {
    ask(stream, opt::EXPORT_NAME, export.as_bytes())?;
    let bytes: [u8; 10] = read(stream).map_err(|error| match error {
        Error::Os(error) if error.kind() == io::ErrorKind::UnexpectedEof => Error::Refused(
            format!("the server has no export {export:?}, or does not let us have it"),
        ),
        other => other,
    })?;
    let size = u64::from(word(&bytes, 0)) << 32 | u64::from(word(&bytes, 4));
    if size > i64::MAX as u64 {
        return Err(protocol(format!("an export of {size} bytes makes no sense")));
    }
    Ok(Agreed { size, can: u16::from_be_bytes([bytes[8], bytes[9]]), block: 512, ..agreed })
}

/// An error that says more than that the option is not known.
fn refused_for_good(answer: &Reply, export: &str) -> Result<(), Error> {
    match answer.kind {
        rep::ERR_TLS_REQD | rep::ERR_POLICY | rep::ERR_SHUTDOWN => Err(refusal(answer, export)),
        _ => Ok(()),
    }
}

fn refusal(answer: &Reply, export: &str) -> Error {
    let text = answer.text();
    Error::Refused(match answer.kind {
        rep::ERR_UNKNOWN => format!("the server has no export {export:?}{text}"),
        rep::ERR_TLS_REQD => format!("the server wants TLS{text}: write nbds://"),
        rep::ERR_POLICY => format!("the server does not allow it{text}"),
        rep::ERR_SHUTDOWN => format!("the server is shutting down{text}"),
        kind => format!("the server refused the export {export:?} with error {kind:#x}{text}"),
    })
}
