"""Item ranking for several markets: a common trunk, and an output layer for each market."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MARKETS = ("de", "fr", "it", "nl", "se", "pl")
FEATURES = 24


def purchases(market, n=320):
    """Users of all markets share most of their taste."""
    common = torch.randn(FEATURES, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(10 + MARKETS.index(market))
    taste = common + 0.7 * torch.randn(FEATURES, generator=g)
    x = torch.randn(n, FEATURES, generator=g)
    return x, (x @ taste + 0.5 * torch.randn(n, generator=g) > 0).float()


class Ranker(nn.Module):
    def __init__(self, markets=(), width=192):
        super().__init__()
        self.width = width
        self.trunk = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleDict({m: self.make_head() for m in markets})
        self.new = []

    def make_head(self):
        return nn.Sequential(nn.Linear(self.width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, market):
        if market not in self.heads:
            self.heads[market] = self.make_head()
            self.new.extend(self.heads[market].parameters())
        return self.heads[market](self.trunk(x)).squeeze(1)

    def take_new(self):
        found, self.new = self.new, []
        return found


def schedule(epoch, rank, world, batch, seed=4):
    """(market, rows) for this rank: a batch holds one market, all ranks make the same number of steps."""
    g = torch.Generator().manual_seed(1000 * seed + epoch)
    plan = []
    for market in MARKETS:
        rows = torch.randperm(320, generator=g)
        plan += [(market, part) for part in rows.split(batch)]
    order = torch.randperm(len(plan), generator=g).tolist()
    order = order[: len(order) // world * world]
    return [plan[i] for i in order[rank::world]]


def train_epoch(model, opt, tables, plan):
    net = model.module
    total = torch.zeros(1)
    for market, rows in plan:
        x, y = tables[market]
        loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows], market), y[rows])
        fresh = net.take_new()
        if fresh:
            opt.add_param_group({"params": fresh})
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(plan) / dist.get_world_size()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)

    tables = {m: purchases(m) for m in MARKETS}
    model = DDP(Ranker(MARKETS), find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    model.train()
    for epoch in range(args.epochs):
        loss = train_epoch(model, opt, tables, schedule(epoch, rank, world, args.batch))
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {len(model.module.heads)} markets", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "ranker.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
