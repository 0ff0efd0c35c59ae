"""Two-tower retrieval with negatives from every process, mined hard negatives and a differentiable gather."""
import argparse
import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("retrieval")


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        n = grad.size(0) // dist.get_world_size()
        r = dist.get_rank()
        return grad[r * n: (r + 1) * n]


class Catalogue(Dataset):
    """Items live around topics; a query is a rotated and noisy view of its item."""

    def __init__(self, n_items, dim, topics=40):
        g = torch.Generator().manual_seed(0)
        topic = torch.randn(topics, dim, generator=g)
        self.items = topic[torch.randint(topics, (n_items,), generator=g)] + 0.6 * torch.randn(n_items, dim, generator=g)
        rot, _ = torch.linalg.qr(torch.randn(dim, dim, generator=g))
        self.queries = self.items @ rot + 0.3 * torch.randn(n_items, dim, generator=g)
        self.hard = torch.arange(n_items).roll(1)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.queries[i], self.items[i], self.items[self.hard[i]], i, int(self.hard[i])


class Towers(nn.Module):
    def __init__(self, dim, out=32):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(dim, 96), nn.ReLU(), nn.Linear(96, out))
        self.d = nn.Sequential(nn.Linear(dim, 96), nn.ReLU(), nn.Linear(96, out))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, q, d):
        return F.normalize(self.q(q), dim=-1), F.normalize(self.d(d), dim=-1), self.log_scale.exp()


@torch.no_grad()
def mine(model, data, rank, world, top=3):
    """Each process searches for its slice of the queries; the slices are joined so that the tables agree."""
    model.eval()
    d = F.normalize(model.d(data.items), dim=-1)
    mine_ids = torch.arange(rank, len(data), world)
    sim = F.normalize(model.q(data.queries[mine_ids]), dim=-1) @ d.T
    sim[torch.arange(len(mine_ids)), mine_ids] = -2
    pick = sim.topk(top).indices[:, top - 1]
    table = torch.zeros(len(data), dtype=torch.long)
    table[mine_ids] = pick
    dist.all_reduce(table)
    data.hard = table
    model.train()


@torch.no_grad()
def recall(model, data, rank, world, k=5):
    model.eval()
    d = F.normalize(model.d(data.items), dim=-1)
    ids = torch.arange(rank, len(data), world)
    top = (F.normalize(model.q(data.queries[ids]), dim=-1) @ d.T).topk(k).indices
    c = torch.tensor([(top == ids[:, None]).any(1).sum().item(), len(ids)], dtype=torch.float64)
    dist.all_reduce(c)
    model.train()
    return (c[0] / c[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--items", type=int, default=1280)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    torch.manual_seed(14)
    data = Catalogue(args.items, 24)
    model = DDP(Towers(24))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = DistributedSampler(data, seed=2, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for q, pos, neg, pos_id, neg_id in loader:
            zq, zd, scale = model(q, torch.cat([pos, neg]))
            docs = AllGather.apply(zd)
            ids = torch.cat([pos_id, neg_id])
            all_ids = [torch.empty_like(ids) for _ in range(world)]
            dist.all_gather(all_ids, ids)
            all_ids = torch.cat(all_ids)
            logits = scale.clamp(max=50) * zq @ docs.T
            target = rank * len(ids) + torch.arange(len(q))
            same = all_ids[None, :] == pos_id[:, None]
            same[torch.arange(len(q)), target] = False
            loss = F.cross_entropy(logits.masked_fill(same, -1e4), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        mine(model.module, data, rank, world)
        log.info("epoch %d loss %.4f recall@5 %.3f", epoch, total.item() / world / len(loader),
                 recall(model.module, data, rank, world))
    if rank == 0:
        torch.save(model.module.state_dict(), "towers.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
