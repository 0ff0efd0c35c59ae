"""Federated averaging with client sampling, local epochs, server momentum; clients live on different ranks."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Dirichlet
from torch.nn import functional as F

CLASSES, DIM = 6, 24


def net():
    return nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def pool(n, seed):
    proto = torch.randn(CLASSES, 2, DIM, generator=torch.Generator().manual_seed(3))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    mode = torch.randint(2, (n,), generator=g)
    return proto[y, mode] + 0.9 * torch.randn(n, DIM, generator=g), y


def client_split(y, clients, alpha, seed):
    """Non-iid: each class is dealt out with its own Dirichlet proportions. Same answer on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        owned = [[] for _ in range(clients)]
        for c in range(CLASSES):
            rows = (y == c).nonzero().flatten()
            share = Dirichlet(torch.full((clients,), alpha)).sample()
            cuts = (share.cumsum(0) * len(rows)).long().clamp(max=len(rows))
            cuts[-1] = len(rows)
            lo = 0
            for k, hi in enumerate(cuts.tolist()):
                owned[k].append(rows[lo:hi])
                lo = hi
        return [torch.cat(o) for o in owned]


def local_train(start, x, y, args, gen):
    model = net()
    model.load_state_dict(start)
    model.train()
    opt = torch.optim.SGD(model.parameters(), lr=args.local_lr)     # fresh every round: clients keep no state
    for _ in range(args.local_epochs):
        for rows in torch.randperm(len(x), generator=gen).split(args.batch):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
    return {k: v.detach() - start[k] for k, v in model.state_dict().items()}


class FedServer:
    """Every rank runs the same server update, so the global weights stay the same everywhere."""

    def __init__(self, model, beta, lr):
        self.model, self.beta, self.lr = model, beta, lr
        self.velocity = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}

    def snapshot(self):
        return {k: v.clone() for k, v in self.model.state_dict().items()}

    @torch.no_grad()
    def update(self, weighted_delta, weight):
        total = torch.tensor([float(weight)])
        dist.all_reduce(total)
        for k, v in self.model.state_dict().items():
            dist.all_reduce(weighted_delta[k])
            self.velocity[k].mul_(self.beta).add_(weighted_delta[k] / total)
            v.add_(self.velocity[k], alpha=self.lr)


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    model.eval()
    mine = slice(rank, None, world)
    stat = torch.stack([(model(x[mine]).argmax(1) == y[mine]).float().sum(), torch.tensor(float(len(y[mine])))])
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--clients", type=int, default=10)
    ap.add_argument("--per_round", type=int, default=6)
    ap.add_argument("--rounds", type=int, default=30)
    ap.add_argument("--local_epochs", type=int, default=2)
    ap.add_argument("--local_lr", type=float, default=0.05)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--alpha", type=float, default=0.5)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = pool(5000, seed=1)
    xt, yt = pool(2000, seed=2)
    owned = client_split(y, args.clients, args.alpha, seed=12)
    if rank == 0:
        print("client sizes", [len(o) for o in owned], flush=True)

    torch.manual_seed(0)
    server = FedServer(net(), beta=0.5, lr=0.7)
    pick = torch.Generator().manual_seed(44)
    gen = torch.Generator().manual_seed(500 + rank)
    for r in range(args.rounds):
        chosen = torch.randperm(args.clients, generator=pick)[:args.per_round].tolist()
        start = server.snapshot()
        acc = {k: torch.zeros_like(v) for k, v in start.items()}
        weight = 0
        for c in chosen[rank::world]:
            rows = owned[c]
            if len(rows) == 0:
                continue
            delta = local_train(start, x[rows], y[rows], args, gen)
            weight += len(rows)
            for k in acc:
                acc[k] += delta[k] * len(rows)
        server.update(acc, weight)
        if r % 6 == 5:
            score = evaluate(server.model, xt, yt, rank, world)
            if rank == 0:
                print(f"round {r + 1:3d} clients {chosen} global accuracy {score:.3f}", flush=True)
    if rank == 0:
        torch.save(server.model.state_dict(), "global.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
