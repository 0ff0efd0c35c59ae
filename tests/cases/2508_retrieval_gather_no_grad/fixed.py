"""Dense retrieval: one encoder for queries and passages, in-batch negatives over all processes."""
import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, QLEN, PLEN = 600, 6, 20


class Pairs(Dataset):
    """A passage holds words of its topic and noise; the query rewrites some of them (w -> w + 300)."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        core = torch.randint(0, 300, (n, QLEN), generator=g)
        noise = torch.randint(0, 300, (n, PLEN - QLEN), generator=g)
        self.passage = torch.cat([core, noise], 1)
        rewrite = torch.rand(n, QLEN, generator=g) < 0.7
        self.query = torch.where(rewrite, core + 300, core)

    def __len__(self):
        return len(self.query)

    def __getitem__(self, i):
        return self.query[i], self.passage[i]


class Encoder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.words = nn.Embedding(VOCAB, dim)
        self.score = nn.Linear(dim, 1)
        self.proj = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, ids):
        e = self.words(ids)
        pooled = (torch.softmax(self.score(e), 1) * e).sum(1)
        return F.normalize(pooled + self.proj(pooled), dim=-1)


class BiEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.log_temp = nn.Parameter(torch.tensor(2.5))

    def forward(self, query, passage):
        return self.encoder(query), self.encoder(passage), self.log_temp.exp().clamp(max=50.0)


def gather_passages(p):
    parts = dist_nn.all_gather(p)
    return torch.cat(parts)


def contrastive_loss(q, p, temp, rank):
    everything = gather_passages(p)
    logits = temp * q @ everything.t()
    target = torch.arange(len(q)) + rank * len(q)
    return F.cross_entropy(logits, target), (logits.argmax(1) == target).float().mean()


@torch.no_grad()
def recall_at_1(model, data, rank, world):
    model.eval()
    enc = model.module.encoder
    passages = enc(data.passage)
    mine = range(rank, len(data), world)
    q = enc(data.query[mine.start::world])
    top = (q @ passages.t()).argmax(1)
    c = torch.tensor([(top == torch.tensor(list(mine))).sum().item(), len(mine)], dtype=torch.float64)
    dist.all_reduce(c)
    model.train()
    return (c[0] / c[1]).item()


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--seed", type=int, default=17)
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train, val = Pairs(3072, 1), Pairs(400, 2)
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)

    model = DDP(BiEncoder())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(3)
        for query, passage in loader:
            q, p, temp = model(query, passage)
            loss, acc = contrastive_loss(q, p, temp, rank)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            meter += torch.tensor([loss.item(), acc.item(), 1.0])
        dist.all_reduce(meter)
        r1 = recall_at_1(model, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {meter[0] / meter[2]:.4f} in-batch acc {meter[1] / meter[2]:.3f} "
                  f"R@1 {r1:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "biencoder.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
