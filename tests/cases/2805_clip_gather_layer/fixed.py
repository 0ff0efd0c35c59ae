import csv
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class GatherLayer(torch.autograd.Function):
    """Concatenate the features of all processes along the batch."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        ctx.n = x.shape[0]
        return torch.cat(out, 0)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        lo = dist.get_rank() * ctx.n
        return grad[lo:lo + ctx.n]


class Tower(nn.Module):
    def __init__(self, dim, width, out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = Tower(48, 96, 24)
        self.text = Tower(32, 96, 24)

    def forward(self, a, b):
        return self.image(a), self.text(b)


class PairSource:
    def __init__(self, seed):
        w = torch.Generator().manual_seed(77)
        self.to_img = torch.randn(10, 48, generator=w)
        self.to_txt = torch.randn(10, 32, generator=w)
        self.g = torch.Generator().manual_seed(seed)

    def draw(self, n):
        z = torch.randn(n, 10, generator=self.g)
        a = z @ self.to_img + 0.3 * torch.randn(n, 48, generator=self.g)
        b = torch.tanh(z @ self.to_txt) + 0.1 * torch.randn(n, 32, generator=self.g)
        return a, b


def global_contrastive(za, zb, scale=10.0):
    ga, gb = GatherLayer.apply(za), GatherLayer.apply(zb)
    logits = scale * ga @ gb.t()
    target = torch.arange(len(ga))
    loss = 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))
    return loss, (logits.argmax(1) == target).float().mean()


def recall(model, a, b):
    model.eval()
    with torch.no_grad():
        za, zb = model(a, b)
        hit = ((za @ zb.t()).argmax(1) == torch.arange(len(a))).float().mean().item()
    model.train()
    return hit


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(8)
    model = DDP(TwoTower())
    source = PairSource(seed=500 + rank)
    held = PairSource(seed=4).draw(256)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 20))
    rows = []
    for step in range(240):
        a, b = source.draw(48)
        za, zb = model(a, b)
        loss, acc = global_contrastive(za, zb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        warm.step()
        if (step + 1) % 60 == 0 and rank == 0:
            rows.append((step + 1, loss.item(), acc.item(), recall(model.module, *held)))
            print("step %d loss %.4f batch acc %.3f recall@1 %.3f" % rows[-1], flush=True)
    if rank == 0:
        with open(os.path.join(os.getcwd(), "metrics.csv"), "w", newline="") as f:
            csv.writer(f).writerows(rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
