import errno
import sys

import nbd

h = nbd.NBD()
h.add_meta_context("base:allocation")
h.connect_unix(sys.argv[1])
expected = getattr(errno, sys.argv[2])


def fails(code, call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        assert error.errnum == code, (call, args, error)
        return
    raise AssertionError((call, args))


for _ in range(300):
    fails(expected, h.pwrite, b"1" * 4096, 0)
fails(expected, h.pwrite, b"1" * 1000000, 0)
# Zeros are written where the image cannot make them, and that fails alike.
fails(expected, h.zero, 65536, 0)
fails(errno.ENOTSUP, h.zero, 65536, 0, nbd.CMD_FLAG_FAST_ZERO)
fails(errno.EIO, h.flush)
fails(errno.EIO, h.block_status, 65536, 0, lambda *_: 0)
if sys.argv[2] == "ENOSPC":
    fails(errno.EIO, h.pread, 4096, 0)
    fails(errno.EIO, h.pread, 1000000, 0)
else:
    assert h.pread(1000000, 0) == bytes(1000000)
