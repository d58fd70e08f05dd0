import errno
import sys

import nbd

h = nbd.NBD()
h.connect_unix(sys.argv[1])
assert h.is_read_only()
h.set_strict_mode(0)
for call, args in [
    (h.pwrite, (b"1", 0)),
    (h.pwrite, (b"1" * 65536, 0, nbd.CMD_FLAG_FUA)),
    (h.zero, (512, 0)),
    (h.trim, (512, 0)),
]:
    try:
        call(*args)
    except nbd.Error as error:
        assert error.errnum == errno.EPERM, error
    else:
        raise AssertionError(call)
h.flush()
assert h.pread(65536, 0) == b"\x09" * 65536
