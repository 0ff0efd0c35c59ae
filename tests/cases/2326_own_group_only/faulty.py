"""Two-level local SGD: gradients are averaged inside an island, weights across islands now and then."""
import argparse
import os
import uuid

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def tabular(n, seed):
    rule = torch.Generator().manual_seed(31)
    w1, w2 = torch.randn(20, 16, generator=rule), torch.randn(16, 4, generator=rule)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    y = (torch.tanh(x @ w1 / 3) @ w2).argmax(dim=1)
    return TensorDataset(x, y)


def make_islands(rank, world, size):
    """Return (members, group) of the island this process belongs to."""
    start = rank // size * size
    members = list(range(start, start + size))
    return members, dist.new_group(members)


class Averager:
    def __init__(self, model, members, group, world, period):
        self.model, self.members, self.group = model, members, group
        self.world, self.period = world, period

    def gradients(self):
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        dist.all_reduce(flat, group=self.group)
        flat /= len(self.members)
        offset = 0
        for p in self.model.parameters():
            n = p.numel()
            p.grad.copy_(flat[offset:offset + n].view_as(p))
            offset += n

    @torch.no_grad()
    def weights(self):
        flat = nn.utils.parameters_to_vector(self.model.parameters())
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / self.world, self.model.parameters())

    def after_step(self, step):
        if step % self.period == 0:
            self.weights()


@torch.no_grad()
def accuracy(model, data, rank, world):
    x, y = data.tensors
    pred = model(x[rank::world]).argmax(dim=1)
    stats = torch.tensor([(pred == y[rank::world]).sum().item(), len(pred)], dtype=torch.float64)
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def run(rank, args, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=args.world)
    members, group = make_islands(rank, args.world, args.island)

    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    averager = Averager(model, members, group, args.world, args.period)
    averager.weights()

    train, test = tabular(4096, seed=1), tabular(1024, seed=2)
    sampler = DistributedSampler(train, args.world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            averager.gradients()
            optimizer.step()
            step += 1
            averager.after_step(step)
            seen += torch.tensor([loss.item() * len(x), len(x)], dtype=torch.float64)
        averager.weights()
        dist.all_reduce(seen)
        acc = accuracy(model, test, rank, args.world)
        if rank == 0:
            print(f"epoch {epoch} loss {seen[0] / seen[1]:.4f} accuracy {acc:.3f}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "islands.pt")
    dist.barrier()
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--world", type=int, default=4)
    ap.add_argument("--island", type=int, default=2)
    ap.add_argument("--period", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=6)
    args = ap.parse_args()
    store = os.path.abspath(f"rdzv_{uuid.uuid4().hex}")
    mp.spawn(run, args=(args, f"file://{store}"), nprocs=args.world)


if __name__ == "__main__":
    main()
