import errno
import sys

import nbd

MIB = 1 << 20


def connect(structured=True, context=True):
    h = nbd.NBD()
    h.set_request_structured_replies(structured)
    if context:
        h.add_meta_context("base:allocation")
    h.connect_unix(sys.argv[1])
    assert h.get_structured_replies_negotiated() == structured
    return h


def extents(h, offset, length, flags=0):
    found = []

    def take(context, at, entries, error):
        assert context == "base:allocation" and at == offset
        found.extend(zip(entries[::2], entries[1::2]))

    h.block_status(length, offset, take, flags)
    return found


def chunks(h, offset, length, flags=0):
    found = []

    def take(data, at, kind, error):
        found.append((at - offset, len(data), kind))

    data = h.pread_structured(length, offset, take, flags)
    return bytes(data), sorted(found)


h = connect()
assert h.get_size() == 64 * MIB

# Writes with FUA, and what they read back as.
h.pwrite(b"x" * 4096, 0, nbd.CMD_FLAG_FUA)
h.pwrite(b"y" * 4096, 4096)
h.flush()
assert h.pread(8192, 0) == b"x" * 4096 + b"y" * 4096

# 32 MiB in one request, both ways.
big = bytes(range(256)) * (32 * MIB // 256)
h.pwrite(big, 8 * MIB)
assert h.pread(32 * MIB, 8 * MIB) == big
assert chunks(h, 8 * MIB, 32 * MIB, nbd.CMD_FLAG_DF) == (big, [(0, 32 * MIB, nbd.READ_DATA)])

# Zeros: fast, with and without holes.
h.zero(MIB, 8 * MIB, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(MIB, 8 * MIB) == bytes(MIB)
assert extents(h, 8 * MIB, MIB)[0] == (MIB, 3)
h.zero(MIB, 10 * MIB, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
assert h.pread(2 * MIB, 9 * MIB) == big[MIB : 2 * MIB] + bytes(MIB)
# Zeros of any bytes.
h.zero(1001, 11 * MIB + 7)
assert h.pread(1020, 11 * MIB) == big[:7] + bytes(1001) + big[1008:1020]
assert h.pread(4096, 11 * MIB + 1008) == big[1008 : 1008 + 4096]

# Trim gives the space back.
h.trim(4 * MIB, 16 * MIB, nbd.CMD_FLAG_FUA)
assert extents(h, 16 * MIB, 4 * MIB)[0] == (4 * MIB, 3)

# Block status from data to hole; one extent where one is asked for, never past the request.
assert extents(h, 15 * MIB, 2 * MIB) == [(MIB, 0), (MIB, 3)]
assert extents(h, 15 * MIB, 2 * MIB, nbd.CMD_FLAG_REQ_ONE) == [(MIB, 0)]
assert extents(h, 16 * MIB, 512, nbd.CMD_FLAG_REQ_ONE) == [(512, 3)]

# Reads come in chunks where there are holes, in one piece where the client wants it so.
data, found = chunks(h, 17 * MIB, MIB)
assert data == bytes(MIB)
assert found == [(0, MIB, nbd.READ_HOLE)], found
data, found = chunks(h, 19 * MIB, 2 * MIB)
assert data == bytes(MIB) + big[:MIB]
assert found == [(0, MIB, nbd.READ_HOLE), (MIB, MIB, nbd.READ_DATA)], found
chunks(h, 17 * MIB, MIB)
data, found = chunks(h, 15 * MIB, 2 * MIB)
assert data == big[7 * MIB : 8 * MIB] + bytes(MIB)
assert found == [(0, MIB, nbd.READ_DATA), (MIB, MIB, nbd.READ_HOLE)], found
data, found = chunks(h, 17 * MIB, MIB, nbd.CMD_FLAG_DF)
assert data == bytes(MIB) and found == [(0, MIB, nbd.READ_DATA)], found
data, found = chunks(h, 20 * MIB, MIB)
assert data == big[:MIB] and found == [(0, MIB, nbd.READ_DATA)], found

# A map of more extents than one reply holds is walked to its end.
for i in range(0, 3000):
    h.pwrite(b"z", 40 * MIB + i * 8192)
at, end, data = 40 * MIB, 40 * MIB + 3000 * 8192, 0
while at < end:
    some = extents(h, at, end - at)
    assert some
    data += sum(length for length, kind in some if kind == 0)
    at += sum(length for length, kind in some)
assert at == end and data == 3000 * 4096, (at - end, data)

h.cache(MIB, 8 * MIB)

# A second connection sees what was written through the first, flushed by either.
other = connect(context=False)
other.pwrite(b"other", 5)
other.flush()
assert h.pread(5, 5) == b"other"
assert h.can_multi_conn()

# Simple replies say the same.
simple = connect(structured=False, context=False)
assert not simple.can_df()
assert simple.pread(32 * MIB, 8 * MIB) == h.pread(32 * MIB, 8 * MIB)
simple.pwrite(b"simple", 100)
assert h.pread(6, 100) == b"simple"
simple.zero(4096, 0)
assert simple.pread(8192, 0) == bytes(4096) + b"y" * 4096
try:
    simple.pread(1, 64 * MIB - 1)
    simple.set_strict_mode(0)
    simple.pread(2, 64 * MIB - 1)
    raise AssertionError("a read past the end went well")
except nbd.Error as error:
    assert error.errnum == errno.EINVAL
assert simple.pread(6, 4096) == b"y" * 6
