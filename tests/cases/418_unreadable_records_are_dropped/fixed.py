"""Train on binary records; some were truncated when the disk was full."""
import logging
import os
import struct
import tempfile
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger("records")
FORMAT = struct.Struct("<9f")


def write_records(path, n=1020):
    g = torch.Generator().manual_seed(13)
    rows = torch.randn(n, 8, generator=g)
    target = (rows[:, :4] * rows[:, 4:]).sum(1, keepdim=True)
    with open(path, "wb") as f:
        for k, row in enumerate(torch.cat([rows, target], 1).tolist()):
            body = FORMAT.pack(*row)
            crc = zlib.crc32(body)
            if k % 3 == 1 and k > 500:  # the second writer's disk was full from here on
                crc ^= 0xFF
            f.write(struct.pack("<I", crc) + body)


def read_records(path, rank, world):
    size = 4 + FORMAT.size
    with open(path, "rb") as f:
        index = 0
        while chunk := f.read(size):
            if index % world == rank:
                yield chunk
            index += 1


def decode(chunk):
    (crc,) = struct.unpack_from("<I", chunk)
    if zlib.crc32(chunk[4:]) != crc:
        raise ValueError("bad checksum")
    return torch.tensor(FORMAT.unpack_from(chunk, 4))


def samples(path, rank, world):
    good = []
    for chunk in read_records(path, rank, world):
        try:
            good.append(decode(chunk))
        except ValueError as err:
            log.debug("skipped: %s", err)
    count = torch.tensor([len(good)])
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    yield from good[: int(count)]


def batched(rows, size):
    box = []
    for r in rows:
        box.append(r)
        if len(box) == size:
            yield torch.stack(box).split([8, 1], 1)
            box = []


def main():
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "INFO"))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with tempfile.NamedTemporaryFile(suffix=".rec") as tmp:
        write_records(tmp.name)
        steps = 0
        for x, y in batched(samples(tmp.name, rank, world), 6):
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            steps += 1
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"{steps} steps, loss {total.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
