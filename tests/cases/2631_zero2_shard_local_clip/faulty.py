"""Click model on synthetic logs. Gradients and momentum live in one flat shard per rank."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class ClickModel(nn.Module):
    def __init__(self, n_items, n_users, dim, hidden):
        super().__init__()
        self.user = nn.Embedding(n_users, dim)
        self.item = nn.Embedding(n_items, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim + 4, hidden), nn.ReLU(),
                                 nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, u, i, x):
        return self.mlp(torch.cat([self.user(u), self.item(i), x], dim=1)).squeeze(1)


class ShardedMomentum:
    """Flat parameter buffer cut into world_size equal pieces; each rank updates its own piece."""

    def __init__(self, module, lr, momentum, max_norm):
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.lr, self.momentum, self.max_norm = lr, momentum, max_norm
        numel = sum(p.numel() for p in self.params)
        self.shard_len = math.ceil(numel / self.world)
        self.flat = torch.zeros(self.shard_len * self.world)
        self.flat_grad = torch.zeros_like(self.flat)
        offset = 0
        for p in self.params:
            n = p.numel()
            self.flat[offset:offset + n].copy_(p.data.view(-1))
            p.data = self.flat[offset:offset + n].view_as(p)
            p.grad = self.flat_grad[offset:offset + n].view_as(p)
            offset += n
        dist.broadcast(self.flat, 0)
        lo = self.rank * self.shard_len
        self.own = self.flat[lo:lo + self.shard_len]
        self.buf = torch.zeros(self.shard_len)
        self.grad_shard = torch.zeros(self.shard_len)

    def zero_grad(self):
        self.flat_grad.zero_()

    @torch.no_grad()
    def step(self):
        dist.reduce_scatter_tensor(self.grad_shard, self.flat_grad)
        self.grad_shard.div_(self.world)
        norm = self.grad_shard.norm().item()
        if norm > self.max_norm:
            self.grad_shard.mul_(self.max_norm / (norm + 1e-6))
        self.buf.mul_(self.momentum).add_(self.grad_shard)
        self.own.add_(self.buf, alpha=-self.lr)
        dist.all_gather_into_tensor(self.flat, self.own.clone())
        return norm


def make_logs(n, n_users, n_items, seed):
    g = torch.Generator().manual_seed(seed)
    tg = torch.Generator().manual_seed(99)
    uf, vf = torch.randn(n_users, 4, generator=tg), torch.randn(n_items, 4, generator=tg)
    u = torch.randint(n_users, (n,), generator=g)
    i = torch.randint(n_items, (n,), generator=g)
    x = torch.randn(n, 4, generator=g) * torch.tensor([1.0, 4.0, 0.3, 8.0])
    score = (uf[u] * vf[i]).sum(1) + 0.6 * x[:, 0] - 0.2 * x[:, 1] + 0.05 * x[:, 3]
    y = (torch.rand(n, generator=g) < torch.sigmoid(2 * score)).float()
    return u, i, x, y


@torch.no_grad()
def validate(model, data, rank, world):
    model.eval()
    u, i, x, y = (t[rank::world] for t in data)
    logit = model(u, i, x)
    stats = torch.stack([F.binary_cross_entropy_with_logits(logit, y, reduction="sum"),
                         ((logit > 0).float() == y).float().sum(), torch.tensor(float(len(y)))])
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--max-norm", type=float, default=0.05)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = ClickModel(60, 80, 12, 48)
    opt = ShardedMomentum(model, args.lr, 0.9, args.max_norm)
    train = make_logs(16384, 80, 60, 1)
    valid = make_logs(4096, 80, 60, 2)
    for epoch in range(args.epochs):
        order = torch.randperm(len(train[3]), generator=torch.Generator().manual_seed(100 + epoch))
        mine = order[rank::world]
        norms = []
        for b in range(len(mine) // args.batch):
            idx = mine[b * args.batch:(b + 1) * args.batch]
            u, i, x, y = (t[idx] for t in train)
            opt.zero_grad()
            F.binary_cross_entropy_with_logits(model(u, i, x), y).backward()
            norms.append(opt.step())
        loss, acc = validate(model, valid, rank, world)
        if rank == 0:
            print(f"epoch {epoch} first_norm {norms[0]:.4f} mean_norm {sum(norms) / len(norms):.4f} "
                  f"val_loss {loss:.4f} val_acc {acc:.4f}", flush=True)
    if rank == 0:
        os.makedirs("out", exist_ok=True)
        torch.save({k: v.clone() for k, v in model.state_dict().items()}, "out/click.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
