"""Contrastive pairs (caption / picture vectors) with negatives from all processes."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class AllGather(torch.autograd.Function):
    """Concatenates the features of all ranks; every rank's use of them flows back to the owner."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class TwoTowers(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.text = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, dim))
        self.image = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, text, image):
        return F.normalize(self.text(text), dim=1), F.normalize(self.image(image), dim=1)


class PairLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.3)))

    def forward(self, t, v):
        all_t, all_v = AllGather.apply(t), AllGather.apply(v)
        own = torch.arange(len(t)) + dist.get_rank() * len(t)
        scale = self.logit_scale.exp()
        return 0.5 * (F.cross_entropy(scale * t @ all_v.t(), own) + F.cross_entropy(scale * v @ all_t.t(), own))


class PairSource:
    """Endless pairs: both sides are noisy views of one hidden vector."""

    def __init__(self, rank):
        g = torch.Generator().manual_seed(8)
        self.to_text, self.to_image = torch.randn(6, 20, generator=g), torch.randn(6, 30, generator=g)
        self.gen = torch.Generator().manual_seed(500 + rank)

    def __iter__(self):
        while True:
            h = torch.randn(16, 6, generator=self.gen)
            noise = [0.3 * torch.randn(16, n, generator=self.gen) for n in (20, 30)]
            yield h @ self.to_text + noise[0], h @ self.to_image + noise[1]


def run(max_steps=120, lr=5e-3):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = DDP(TwoTowers())
    criterion = PairLoss()
    opt = torch.optim.Adam([{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 10 * lr}], lr=lr)

    history = torch.zeros(())
    for step, (text, image) in enumerate(PairSource(rank), start=1):
        loss = criterion(*model(text, image))
        opt.zero_grad()
        loss.backward()
        opt.step()
        history += loss.detach()
        if step % 20 == 0:
            dist.all_reduce(history)
            if rank == 0:
                print(f"step {step}: contrastive loss {history.item() / world / 20:.4f}")
            history.zero_()
        if step == max_steps:
            break
    if rank == 0:
        torch.save({"towers": model.module.state_dict(), "args": {"lr": lr}}, "towers.pt")
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group(backend="gloo", world_size=int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]))
    run()
    dist.destroy_process_group()
