"""Bar orientation with a small BatchNorm network; gradients travel in one flat bucket."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def bars(seed, n=24):
    """Images with one horizontal, vertical or diagonal bar."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 3, (n,), generator=g)
    img = 0.4 * torch.randn(n, 1, 10, 10, generator=g)
    at = torch.randint(2, 8, (n,), generator=g).tolist()
    for i, k in enumerate(kind.tolist()):
        if k == 0:
            img[i, 0, at[i]] += 1.5
        elif k == 1:
            img[i, 0, :, at[i]] += 1.5
        else:
            img[i, 0] += 1.5 * torch.eye(10).roll(at[i] - 5, 0)
    return img, kind


class BucketSync:
    """All gradients of the module in a single all-reduce."""

    def __init__(self, module):
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.world = dist.get_world_size()
        for tensor in list(module.parameters()) + list(module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def average(self):
        grads = [p.grad for p in self.params]
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        flat.div_(self.world)
        for grad, synced in zip(grads, _unflatten_dense_tensors(flat, grads)):
            grad.copy_(synced)


class Trainer:
    def __init__(self, lr=0.1):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 9, 3),
        )  # fmt: skip
        self.sync = BucketSync(self.net)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)

    def step(self, x, y):
        self.opt.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.sync.average()
        self.opt.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, x, y):
        for buf in self.net.buffers():  # one set of running statistics for all ranks
            if buf.is_floating_point():
                dist.all_reduce(buf)
                buf /= self.world
        self.net.eval()
        x, y = x[self.rank :: self.world], y[self.rank :: self.world]
        score = torch.tensor([(self.net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
        dist.all_reduce(score)
        self.net.train()
        return (score[0] / score[1]).item()

    def fit(self, rounds=4, steps=10):
        held_out = bars(seed=999_983, n=150)
        for r in range(rounds):
            total = torch.zeros(())
            for s in range(steps):
                total += self.step(*bars(seed=(r * steps + s) * self.world + self.rank))
            dist.all_reduce(total)
            acc = self.evaluate(*held_out)
            if self.rank == 0:
                print(f"round {r}: loss {total.item() / steps / self.world:.4f}, held-out accuracy {acc:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    Trainer().fit()
    dist.destroy_process_group()
