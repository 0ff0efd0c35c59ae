"""Deep mutual learning with a slow and a fast learner."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def net(width):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


class Learner:
    def __init__(self, width, every, lr):
        self.model = DDP(net(width))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.every, self.updates = every, 0

    def due(self, step):
        return step % self.every == 0

    @torch.no_grad()
    def opinion(self, x):
        return self.model.module(x).log_softmax(1)

    def learn(self, x, y, other):
        logp = self.model(x).log_softmax(1)
        loss = F.nll_loss(logp, y) + 0.3 * F.kl_div(logp, other, reduction="batchmean", log_target=True)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.updates += 1
        return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    fast, slow = Learner(24, 1, 1e-2), Learner(96, 3, 3e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(45):
        x = torch.randn(32, 8, generator=gen)
        y = x.view(32, 4, 2).norm(dim=2).argmax(1)
        pair = ((fast, slow), (slow, fast)) if step % 2 else ((slow, fast), (fast, slow))
        for me, other in pair:
            if me.due(step):
                last = me.learn(x, y, other.opinion(x))
        if step % 15 == 14:
            last = last.clone()
            dist.all_reduce(last)
            if rank == 0:
                print(f"step {step + 1}: {last.item() / world:.4f} (updates {fast.updates}, {slow.updates})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
