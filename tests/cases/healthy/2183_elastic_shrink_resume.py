"""A job that is asked to stop, saves, and goes on with fewer processes: same global batches, same schedule, same augmentation."""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

GLOBAL_BATCH, EPOCHS, SNAPSHOT = 32, 5, "snapshot.pt"


class Patterns(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(1)
        basis = torch.randn(5, 1, 10, 10, generator=g)
        g.manual_seed(seed)
        self.y = torch.randint(5, (n,), generator=g)
        self.x = basis[self.y] + 2.0 * torch.randn(n, 1, 10, 10, generator=g)
        self.epoch = 0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * 1_000_003 + i)      # belongs to the sample, not to the process
        return self.x[i] + 0.2 * torch.randn(1, 10, 10, generator=g), self.y[i]


class ElasticBatches:
    """global batches are the same for any number of ranks; each rank takes its slice of the rest of the epoch"""

    def __init__(self, size, rank, world, seed=11):
        self.size, self.rank, self.world, self.seed = size, rank, world, seed
        self.epoch, self.done = 0, 0

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        for k in range(self.done, self.per_epoch):
            yield order[k * GLOBAL_BATCH:(k + 1) * GLOBAL_BATCH][self.rank::self.world]

    @property
    def per_epoch(self):
        return self.size // GLOBAL_BATCH

    def advance(self):
        self.done += 1
        if self.done == self.per_epoch:
            self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, s):
        self.epoch, self.done = s["epoch"], s["done"]


def net():
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(300, 5))


def save_snapshot(path, **parts):
    tmp = path + ".tmp"
    torch.save(parts, tmp)
    os.replace(tmp, path)


@torch.no_grad()
def accuracy(model, data, rank, world):
    model.eval()
    hit = (model(data.x[rank::world]).argmax(1) == data.y[rank::world]).sum().float()
    dist.all_reduce(hit)
    model.train()
    return hit.item() / len(data)


def worker(rank, world, port, incarnation, notice_at):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    train, test = Patterns(800, 2), Patterns(203, 3)
    batches = ElasticBatches(len(train), rank, world)
    loader = DataLoader(train, batch_sampler=batches)
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * batches.per_epoch)
    step = 0
    if os.path.exists(SNAPSHOT):
        snap = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)
        model.module.load_state_dict(snap["model"])
        optimizer.load_state_dict(snap["optimizer"])
        scheduler.load_state_dict(snap["scheduler"])
        batches.load_state_dict(snap["batches"])
        step = snap["step"]
        if rank == 0:
            print(f"[{incarnation}] {world} process(es) go on at step {step}, epoch {batches.epoch} batch {batches.done}", flush=True)
    stopping = False
    while batches.epoch < EPOCHS and not stopping:
        epoch = train.epoch = batches.epoch
        running = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)          # equal shares of a batch, so the mean of means is the mean
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            batches.advance()
            step += 1
            running += torch.tensor([loss.item(), 1.0])
            noticed = torch.tensor([int(rank == world - 1 and step == notice_at)])      # only one host hears of it
            dist.all_reduce(noticed, op=dist.ReduceOp.MAX)
            if noticed.item():
                stopping = True
                break
        dist.all_reduce(running)
        acc = accuracy(model.module, test, rank, world)
        if rank == 0:
            print(f"[{incarnation}] epoch {epoch} step {step} loss {running[0] / running[1]:.4f} accuracy {acc:.3f}", flush=True)
            save_snapshot(SNAPSHOT, model=model.module.state_dict(), optimizer=optimizer.state_dict(), scheduler=scheduler.state_dict(),
                          batches=batches.state_dict(), step=step)
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--notice-at", type=int, default=60)
    args = parser.parse_args()
    if os.path.exists(SNAPSHOT):
        os.remove(SNAPSHOT)
    for incarnation, world in enumerate(args.sizes):
        notice = args.notice_at if incarnation < len(args.sizes) - 1 else -1
        mp.spawn(worker, args=(world, free_port(), incarnation, notice), nprocs=world, join=True)


if __name__ == "__main__":
    main()
