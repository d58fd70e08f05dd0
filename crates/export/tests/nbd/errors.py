import errno
import sys

import nbd

MIB = 1 << 20
h = nbd.NBD()
h.add_meta_context("base:allocation")
h.connect_unix(sys.argv[1])
# Let the server see what libnbd would refuse by itself.
h.set_strict_mode(0)


def fails(code, call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        assert error.errnum == code, (call, args, error)
        return
    raise AssertionError((call, args))


def take(*_):
    return 0


# Past the end: no space for writes, an invalid argument for all else.
fails(errno.EINVAL, h.pread, 2, MIB - 1)
fails(errno.EINVAL, h.pread, 1, 1 << 62)
fails(errno.ENOSPC, h.pwrite, b"12", MIB - 1)
fails(errno.ENOSPC, h.pwrite, b"1", MIB)
fails(errno.ENOSPC, h.zero, 2, MIB - 1)
fails(errno.EINVAL, h.trim, 2, MIB - 1)
fails(errno.EINVAL, h.cache, 2, MIB - 1)
fails(errno.EINVAL, h.block_status, 2, MIB - 1, take)
# Flags that do not go with the command, or with none.
fails(errno.EINVAL, h.pread, 1, 0, nbd.CMD_FLAG_NO_HOLE)
fails(errno.EINVAL, h.pwrite, b"1", 0, nbd.CMD_FLAG_DF)
fails(errno.EINVAL, h.pwrite, b"1", 0, 1 << 15)
fails(errno.EINVAL, h.trim, 512, 0, nbd.CMD_FLAG_FAST_ZERO)
fails(errno.EINVAL, h.flush, nbd.CMD_FLAG_REQ_ONE)
# Nothing to do is not an error.
assert h.pread(0, 0) == b""
h.pwrite(b"", 0)
h.zero(0, 0)
h.trim(0, 0)
fails(errno.EINVAL, h.block_status, 0, 0, take)
# Zeros that cannot be had fast are refused, and nothing is changed.
h.pwrite(b"q" * 8192, 0)
fails(errno.ENOTSUP, h.zero, 1000, 100, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(8192, 0) == b"q" * 8192
# More than 32 MiB: the payload is read and the connection goes on.
fails(errno.EINVAL, h.pwrite, bytes(33 * MIB), 0)
fails(errno.EOVERFLOW, h.pread, 33 * MIB, 0)
# It is all still there.
assert h.pread(8192, 0) == b"q" * 8192
# Without a context there is no status.
plain = nbd.NBD()
plain.connect_unix(sys.argv[1])
plain.set_strict_mode(0)
fails(errno.EINVAL, plain.block_status, 512, 0, take)
