"""Two experts, two replicas each: gradients are averaged within the pair, the gate over all ranks."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def regimes(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return x, torch.where(x[:, :1] > 0, x[:, 1:2] * x[:, 2:3], x[:, 3:4].abs() - x[:, 4:5])


class Part(nn.Module):
    def __init__(self, out, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, out))

    def forward(self, x):
        return self.net(x)


def make_groups(rank, world):
    """The pair this rank belongs to: (0, 1) or (2, 3)."""
    pairs = [[r, r + 1] for r in range(0, world, 2)]
    own = rank // 2
    groups = [dist.new_group(p) for p in pairs]
    group = groups[own]
    return group, pairs[own]


@torch.no_grad()
def average(params, group=None):
    size = dist.get_world_size(group)
    for p in params:
        dist.all_reduce(p.grad, group=group)
        p.grad /= size


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    group, members = make_groups(rank, world)
    expert_id = members[0] // 2

    torch.manual_seed(20 + expert_id)
    expert = Part(1, 32)
    torch.manual_seed(5)
    gate = Part(2, 8)
    optimizer = torch.optim.Adam([*expert.parameters(), *gate.parameters()], lr=args.lr)
    x_all, y_all = regimes(800, 1)
    rows_gen = torch.Generator().manual_seed(900 + rank)

    for step in range(args.steps):
        rows = torch.randint(0, len(x_all), (args.batch,), generator=rows_gen)
        x, y = x_all[rows], y_all[rows]
        weight = gate(x).softmax(1)[:, expert_id:expert_id + 1]
        error = F.smooth_l1_loss(expert(x), y, reduction="none")
        balance = (weight.mean() - 0.5) ** 2
        loss = (weight * error).mean() + 0.1 * balance
        optimizer.zero_grad()
        loss.backward()
        average(expert.parameters(), group)
        average(gate.parameters())
        optimizer.step()
        if step % 10 == 9:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1}: {shown.item() / world:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
