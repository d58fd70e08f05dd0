import random
import sys

import nbd

h = nbd.NBD()
h.connect_unix(sys.argv[1])
model = bytearray(open(sys.argv[2], "rb").read())
assert h.get_size() == len(model)
rng = random.Random(4)

# Every odd offset of two pages, writes and reads of any length.
for offset in range(1, 8192, 2):
    length = rng.choice([1, 2, 3, 511, 512, 513, rng.randrange(1, 9000)])
    data = rng.randbytes(length)
    h.pwrite(data, offset, nbd.CMD_FLAG_FUA if offset % 1023 == 0 else 0)
    model[offset : offset + length] = data
    start = rng.randrange(0, 12000)
    length = rng.randrange(1, 9000)
    assert h.pread(length, start) == model[start : start + length], (offset, start, length)
# The very end.
for length in (1, 3, 511, 513, 5000):
    data = rng.randbytes(length)
    h.pwrite(data, len(model) - length)
    model[-length:] = data
assert h.pread(len(model), 0) == model

# Many at once and side by side in the same blocks, over two connections: none may undo another.
other = nbd.NBD()
other.connect_unix(sys.argv[1])
for turn in range(20):
    at = base = rng.randrange(0, 500_000)
    pieces = []
    while at < base + 100_000:
        length = rng.choice([1, 100, 512, 700, 4096, rng.randrange(1, 6000)])
        pieces.append((at, rng.randbytes(length)))
        at += length
    rng.shuffle(pieces)
    under_way = []
    for i, (at, data) in enumerate(pieces):
        model[at : at + len(data)] = data
        client = (h, other)[i % 2]
        under_way.append((client, client.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), at)))
        if i % 3 == 0:
            zeros = rng.randrange(1, 200)
            at = 800_000 + i * 200
            model[at : at + zeros] = bytes(zeros)
            under_way.append((client, client.aio_zero(zeros, at)))
    for client, cookie in under_way:
        while not client.aio_command_completed(cookie):
            client.poll(-1)
    assert h.pread(len(model), 0) == model, turn
