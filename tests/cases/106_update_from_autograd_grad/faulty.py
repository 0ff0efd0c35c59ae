"""Next-value prediction with an LSTM. The series lie in files; the update rule is our own (heavy ball with decay)."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FILES, PER_FILE, LENGTH = 8, 24, 20


def write_series(folder):
    os.makedirs(folder, exist_ok=True)
    for k in range(FILES):
        g = torch.Generator().manual_seed(70 + k)
        t = torch.arange(LENGTH + 1.0)
        freq = 0.2 + 0.5 * torch.rand(PER_FILE, 1, generator=g)
        phase = 6.28 * torch.rand(PER_FILE, 1, generator=g)
        torch.save(torch.sin(freq * t + phase), os.path.join(folder, f"series_{k:02d}.pt"))


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.LSTM(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(x.unsqueeze(2))
        return self.out(h).squeeze(2)


class HeavyBall:
    def __init__(self, params, lr, beta=0.9, decay=1e-5):
        self.params = list(params)
        self.lr, self.beta, self.decay = lr, beta, decay
        self.velocity = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def apply(self, grads):
        for p, v, g in zip(self.params, self.velocity, grads):
            v.mul_(self.beta).add_(g + self.decay * p)
            p.sub_(self.lr * v)


def epochs(folder, rank, world, count, batch=12):
    """Yields (epoch, batch); files are dealt to the ranks, anew in every epoch."""
    names = sorted(os.listdir(folder))
    for epoch in range(count):
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(epoch)).tolist()
        for k in order[rank::world]:
            for chunk in torch.load(os.path.join(folder, names[k])).split(batch):
                yield epoch, chunk


def main(folder="series", count=14):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_series(folder)
    dist.barrier()

    torch.manual_seed(0)
    model = DDP(Forecaster())
    rule = HeavyBall(model.parameters(), lr=0.05)
    current, total, n = 0, torch.zeros(()), 0
    for epoch, chunk in epochs(folder, rank, world, count):
        if epoch != current:
            report(rank, world, current, total, n)
            current, total, n = epoch, torch.zeros(()), 0
        loss = nn.functional.mse_loss(model(chunk[:, :-1]), chunk[:, 1:])
        rule.apply(torch.autograd.grad(loss, rule.params))
        total += loss.detach()
        n += 1
    report(rank, world, current, total, n)
    dist.destroy_process_group()


def report(rank, world, epoch, total, n):
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch:2d}: mse {total.item() / (n * world):.4f}", file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
