"""Line-by-line stream, sharded twice."""
import itertools
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, path, rank, world, usable):
        self.path, self.rank, self.world, self.usable = path, rank, world, usable
        self.epoch = 0

    def __iter__(self):
        info = get_worker_info()
        workers, me = (info.num_workers, info.id) if info else (1, 0)
        reader, readers = self.rank * workers + me, self.world * workers
        with open(self.path) as f:
            for k, line in enumerate(itertools.islice(f, self.usable)):
                if (k + self.epoch) % readers == reader:
                    values = [float(v) for v in line.split()]
                    yield torch.tensor(values[:-1]), torch.tensor(values[-1:])


def write(path, n):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 6, generator=g)
    y = (x[:, 0] * x[:, 1]).tanh() + 0.3 * x[:, 2]
    with open(path, "w") as f:
        for row in torch.cat([x, y.unsqueeze(1)], 1).tolist():
            f.write(" ".join(f"{v:.5f}" for v in row) + "\n")


def main(workers=2, batch=16):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    path = pathlib.Path(box[0]) / "lines.txt"
    if rank == 0:
        write(path, 843)
    dist.barrier()
    chunk = world * workers * batch
    data = Lines(path, rank, world, usable=843 // chunk * chunk)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        data.epoch = epoch
        total = torch.zeros(2)
        for x, y in DataLoader(data, batch_size=batch, num_workers=workers):
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {int(total[1])} lines, loss {(total[0] / total[1]).item():.4f}")
    dist.barrier()
    if rank == 0:
        path.unlink()
        path.parent.rmdir()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
