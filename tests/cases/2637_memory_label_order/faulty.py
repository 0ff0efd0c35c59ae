"""Supervised contrastive embedding of noisy shapes with a cross-batch memory, DDP."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    classes: int = 10
    dim: int = 48
    embed: int = 16
    memory: int = 512
    batch: int = 32
    epochs: int = 3
    warm: int = 10
    temp: float = 0.15
    mem_weight: float = 1.0


class Prototypes(Dataset):
    def __init__(self, cfg, n, seed):
        g = torch.Generator().manual_seed(seed)
        centres = torch.randn(cfg.classes, cfg.dim, generator=torch.Generator().manual_seed(8))
        self.y = torch.randint(cfg.classes, (n,), generator=g)
        self.x = centres[self.y] + 1.6 * torch.randn(n, cfg.dim, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Embedder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(cfg.dim, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, cfg.embed))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def gather(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def own_first(t):
    """Local rows (with graph) first, then the rows of the other processes."""
    parts = list(gather(t.detach()).chunk(dist.get_world_size()))
    parts.pop(dist.get_rank())
    return torch.cat([t, *parts])


class Memory:
    def __init__(self, cfg):
        self.feats = torch.zeros(cfg.memory, cfg.embed)
        self.labels = torch.full((cfg.memory,), -1)
        self.cursor = 0

    def push(self, feats, labels):
        idx = (torch.arange(len(labels)) + self.cursor) % len(self.labels)
        self.feats[idx] = feats
        self.labels[idx] = labels
        self.cursor = int((self.cursor + len(labels)) % len(self.labels))

    def full(self):
        return bool((self.labels >= 0).all())


def supcon(anchor, y, bank, bank_y, temp, skip_diag):
    logits = anchor @ bank.T / temp
    same = (y[:, None] == bank_y[None, :]).float()
    if skip_diag:
        keep = torch.ones_like(logits)
        keep[torch.arange(len(y)), torch.arange(len(y))] = 0
        logits = logits.masked_fill(keep == 0, -1e4)
        same = same * keep
    logp = logits.log_softmax(1)
    has = same.sum(1) > 0
    return -((same * logp).sum(1)[has] / same.sum(1)[has]).sum() / len(y)


@torch.no_grad()
def knn_accuracy(net, ref, query, rank, world):
    net.eval()
    bank = net(ref.x)
    sim = net(query.x[rank::world]) @ bank.T
    votes = ref.y[sim.topk(15, dim=1).indices]
    hit = (votes.mode(1).values == query.y[rank::world]).float()
    stat = torch.tensor([hit.sum(), float(len(hit))])
    dist.all_reduce(stat)
    net.train()
    return (stat[0] / stat[1]).item()


def main():
    cfg = Config()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = DDP(Embedder(cfg))
    opt = torch.optim.SGD(net.parameters(), lr=0.08, momentum=0.9, weight_decay=1e-4)
    train, query = Prototypes(cfg, 4096, 1), Prototypes(cfg, 1000, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=6, drop_last=True)
    loader = DataLoader(train, cfg.batch, sampler=sampler, drop_last=True)
    memory, step = Memory(cfg), 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            z = net(x)
            everyone, every_y = own_first(z), own_first(y)
            loss = supcon(z, y, everyone, every_y, cfg.temp, skip_diag=True)
            if memory.full() and step >= cfg.warm:
                loss = loss + cfg.mem_weight * supcon(z, y, memory.feats.clone(), memory.labels, cfg.temp, False)
            opt.zero_grad()
            loss.backward()
            opt.step()
            memory.push(everyone.detach(), gather(y))
            total += torch.tensor([loss.item(), 1.0])
            step += 1
        dist.all_reduce(total)
        acc = knn_accuracy(net.module, train, query, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {(total[0] / total[1]).item():.4f} knn {acc:.4f}", flush=True)
    if rank == 0:
        os.makedirs("embed", exist_ok=True)
        torch.save(net.module.state_dict(), "embed/net.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
