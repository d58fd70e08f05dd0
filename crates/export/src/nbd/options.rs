//! The data of options: names, lists of wishes, queries.

use super::wire::MAX_STRING;

/// The data of an option contradicts itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Reads big-endian numbers and strings from the front of a slice.
pub(super) struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (bytes, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// A 32-bit length and so many bytes.
    fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.u32()? as usize;
        if len > MAX_STRING {
            return Err(Malformed);
        }
        self.bytes(len)
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

/// The data of NBD_OPT_INFO and NBD_OPT_GO: an export's name, then what to tell of it.
pub(super) struct InfoWish<'a> {
    pub(super) name: &'a [u8],
    kinds: &'a [u8],
}

impl<'a> InfoWish<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = usize::from(fields.u16()?);
        let kinds = fields.bytes(count * 2)?;
        fields.end()?;
        Ok(InfoWish { name, kinds })
    }

    pub(super) fn wants(&self, kind: u16) -> bool {
        self.kinds.chunks_exact(2).any(|bytes| bytes == kind.to_be_bytes())
    }
}

/// The data of NBD_OPT_LIST_META_CONTEXT and NBD_OPT_SET_META_CONTEXT.
pub(super) struct ContextWish<'a> {
    pub(super) name: &'a [u8],
    pub(super) queries: Vec<&'a [u8]>,
}

impl<'a> ContextWish<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = fields.u32()? as usize;
        // Each query takes four bytes at least, so the data bounds what is kept.
        let mut queries = Vec::with_capacity(count.min(fields.0.len() / 4));
        for _ in 0..count {
            queries.push(fields.string()?);
        }
        fields.end()?;
        Ok(ContextWish { name, queries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_wishes() {
        let wish = InfoWish::parse(b"\0\0\0\x02ab\0\x02\0\x03\0\0").expect("valid");
        assert_eq!(wish.name, b"ab");
        assert!(wish.wants(3) && wish.wants(0) && !wish.wants(1));
        for bad in [
            &b"\0\0\0\x03ab\0\0"[..],
            b"\0\0\0\x02ab",
            b"\0\0\0\x02ab\0\x01\0",
            b"\0\0\0\x02ab\0\x01\0\0\0",
            b"\xff\xff\xff\xffab\0\0",
        ] {
            assert!(InfoWish::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn context_wishes() {
        let data = b"\0\0\0\x01a\0\0\0\x02\0\0\0\x01b\0\0\0\0";
        let wish = ContextWish::parse(data).expect("valid");
        assert_eq!((wish.name, wish.queries), (&b"a"[..], vec![&b"b"[..], b""]));
        for bad in [&data[..data.len() - 1], b"\0\0\0\x01a\xff\xff\xff\xff", b"", b"\0\0\0\0"] {
            assert!(ContextWish::parse(bad).is_err(), "{bad:?}");
        }
    }
}
