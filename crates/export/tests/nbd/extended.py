"""What libnbd 1.18 or newer does with extended headers, on a sparse disk of 5 TiB."""

import errno
import sys

import nbd

TIB = 1 << 40
h = nbd.NBD()
h.add_meta_context("base:allocation")
h.set_export_name("disk")
h.connect_unix(sys.argv[1])
assert h.get_extended_headers_negotiated()
assert h.get_structured_replies_negotiated()
assert h.can_block_status_payload()
size = h.get_size()
assert size == 5 * TIB


def extents(length, offset, flags=0, only=None):
    found = []

    def take(context, at, entries, error):
        assert context == "base:allocation" and at == offset, (context, at)
        found.append(entries)
        return 0

    if only is None:
        h.block_status_64(length, offset, take, flags=flags)
    else:
        h.block_status_filter(length, offset, only, take, flags=flags)
    assert len(found) == 1, found
    return found[0]


assert extents(size, 0) == [(size, 3)]
data = bytes(range(256)) * 256
h.pwrite(data, 3 * TIB)
assert h.pread(len(data) + 4096, 3 * TIB - 4096) == bytes(4096) + data
rest = size - 3 * TIB - len(data)
assert extents(size, 0) == [(3 * TIB, 3), (len(data), 0), (rest, 3)]
assert extents(size, 0, nbd.CMD_FLAG_REQ_ONE) == [(3 * TIB, 3)]
assert extents(5, 3 * TIB, nbd.CMD_FLAG_REQ_ONE) == [(5, 0)]
assert extents(size, 0, only=["base:allocation"])[1] == (len(data), 0)

chunks = []
h.pread_structured(1 << 20, 3 * TIB - 65536, lambda b, at, kind, e: chunks.append((len(b), at, kind)))
assert sum(chunk[0] for chunk in chunks) == 1 << 20

h.zero(size - 2 * TIB, 2 * TIB, nbd.CMD_FLAG_FUA)
assert extents(size, 0) == [(size, 3)]
assert h.pread(len(data), 3 * TIB) == bytes(len(data))
h.pwrite(data, 4 * TIB)
h.trim(2 * TIB, 3 * TIB)
assert h.pread(len(data), 4 * TIB) == bytes(len(data))
h.cache(1 << 33, 0)
h.flush()

h.set_strict_mode(nbd.STRICT_AUTO_FLAG)
for action, expected in [
    (lambda: h.zero(size, 1), errno.ENOSPC),
    (lambda: h.trim(size, 1), errno.EINVAL),
    (lambda: h.pwrite(data, size - 1), errno.ENOSPC),
    (lambda: h.pread(1, size), errno.EINVAL),
    (lambda: h.block_status_filter(0, 0, ["base:allocation"], lambda *_: 0), errno.EINVAL),
    (lambda: h.block_status_64(size, 1, lambda *_: 0), errno.EINVAL),
]:
    try:
        action()
        raise AssertionError("it should have failed")
    except nbd.Error as error:
        assert error.errnum == expected, (error, expected)
assert h.pread(16, 0) == bytes(16)
h.shutdown()
