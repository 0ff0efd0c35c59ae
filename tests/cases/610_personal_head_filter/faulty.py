"""Personalised federated training: shared body, one private head per client (= rank)."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn


class Body(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.inp = nn.Linear(6, d)
        self.multihead = nn.MultiheadAttention(d, 3, batch_first=True)
        self.norm = nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, x):
        h = torch.relu(self.inp(x))
        h = self.norm(h + self.multihead(h, h, h, need_weights=False)[0])
        return (h + self.ff(h)).mean(1)


class Client(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(24, outputs)

    def forward(self, x):
        return self.head(self.body(x))


def shared_parameters(model):
    """Everything but the client's own head takes part in the average."""
    return [p for name, p in model.named_parameters() if "head" not in name]


def client_data(rank, n=192):
    g = torch.Generator().manual_seed(500 + rank)
    x = torch.randn(n, 5, 6, generator=g)
    shift = torch.randn(6, generator=g)
    return x, ((x @ shift).amax(1) > 1.5).long()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=4)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Client(outputs=2)
    shared = shared_parameters(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    x, y = client_data(rank)
    order_rng = torch.Generator().manual_seed(rank)

    for rnd in range(args.rounds):
        stat = torch.zeros(world)
        for idx in torch.randperm(len(x), generator=order_rng).split(args.bs):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x[idx]), y[idx])
            loss.backward()
            flat = torch.cat([p.grad.flatten() for p in shared])
            dist.all_reduce(flat)
            for p, g in zip(shared, flat.div_(world).split([p.numel() for p in shared])):
                p.grad.copy_(g.view_as(p))
            opt.step()
            stat[rank] += loss.item() / (len(x) / args.bs)
        dist.all_reduce(stat)
        if rank == 0:
            print(f"round {rnd}: " + "  ".join(f"client {i} {v:.3f}" for i, v in enumerate(stat.tolist())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
