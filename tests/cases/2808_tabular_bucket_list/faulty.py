import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_table(n, seed):
    g = torch.Generator().manual_seed(seed)
    cat = torch.randint(0, 12, (n, 3), generator=g)
    num = torch.randn(n, 10, generator=g)
    eff = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    score = num[:, 0] * num[:, 1] + torch.sin(2 * num[:, 2]) + sum(eff[i][cat[:, i]] for i in range(3))
    label = (score + 0.3 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(cat, num, label)


class TabNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(12, 8) for _ in range(3)])
        self.mlp = nn.Sequential(nn.Linear(34, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, cat, num):
        e = [t(cat[:, i]) for i, t in enumerate(self.tables)]
        return self.mlp(torch.cat(e + [num], 1)).squeeze(1)


class BucketReducer:
    """All-reduces gradients in buckets of about `cap` elements."""

    def __init__(self, params, cap=4096):
        self.params = list(params)
        self.cap = cap
        self.world = dist.get_world_size()
        self.buckets = None

    def _build(self):
        buckets, cur, size = [], [], 0
        for p in reversed(self.params):
            cur.append(p.grad)
            size += p.numel()
            if size >= self.cap:
                buckets.append(cur)
                cur, size = [], 0
        if cur:
            buckets.append(cur)
        return buckets

    def reduce(self):
        if self.buckets is None:
            self.buckets = self._build()
        for bucket in self.buckets:
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat)
            flat.div_(self.world)
            for g, part in zip(bucket, flat.split([g.numel() for g in bucket])):
                g.copy_(part.view_as(g))


class Ema:
    def __init__(self, model, decay=0.98):
        self.model, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


@torch.no_grad()
def accuracy(model, loader):
    c = torch.zeros(2)
    for cat, num, y in loader:
        c += torch.tensor([((model(cat, num) > 0).float() == y).sum(), len(y)])
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = TabNet()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    ema = Ema(model)
    reducer = BucketReducer(model.parameters())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)

    train, valid = build_table(8192, 5), build_table(2048, 6)
    sampler = DistributedSampler(train, world, rank, seed=17)
    loader = DataLoader(train, batch_size=64, sampler=sampler, drop_last=True)
    vloader = DataLoader(valid, batch_size=256, sampler=DistributedSampler(valid, world, rank, shuffle=False))
    best, patience = 0.0, 0
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for cat, num, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(cat, num), y)
            opt.zero_grad()
            loss.backward()
            reducer.reduce()
            opt.step()
            ema.update(model)
        acc = accuracy(ema.model, vloader)
        if rank == 0:
            print(f"epoch {epoch} ema acc {acc:.4f}", flush=True)
        if acc > best + 1e-3:
            best, patience = acc, 0
            if rank == 0:
                torch.save(ema.model.state_dict(), os.path.join(os.getcwd(), "best.pt"))
        else:
            patience += 1
            if patience == 2:
                break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
