"""Population-based training: each rank trains its own member with its own lr; losers copy a winner's weights and perturb its lr."""
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    t = torch.rand(n, generator=g) * 6 + 0.5
    a = t + 3.1416 * y
    return TensorDataset(torch.stack([t * a.cos(), t * a.sin()], 1) / 6 + 0.02 * torch.randn(n, 2, generator=g), y)


class Member:
    def __init__(self, rank):
        self.rank = rank
        self.rng = random.Random(500 + rank)
        torch.manual_seed(500 + rank)
        self.net = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=10 ** self.rng.uniform(-4, -1.5))

    @property
    def lr(self):
        return self.opt.param_groups[0]["lr"]

    def step(self, loader):
        self.net.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def score(self, data):
        self.net.eval()
        x, y = data.tensors
        return (self.net(x).argmax(1) == y).float().mean().item()

    @torch.no_grad()
    def exploit(self, winner, losers):
        """All ranks broadcast; only the losers keep what arrives."""
        for p in self.net.parameters():
            buf = p.detach().clone()
            dist.broadcast(buf, src=winner)
            if self.rank in losers:
                p.copy_(buf)
        box = [self.lr]
        dist.broadcast_object_list(box, src=winner)
        if self.rank in losers:
            self.opt.state.clear()
            self.opt.param_groups[0]["lr"] = box[0] * self.rng.choice([0.8, 1.25])


def main(intervals=8, epochs_per_interval=2):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = spirals(400, 1), spirals(200, 2)
    member = Member(rank)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    for interval in range(intervals):
        for _ in range(epochs_per_interval):
            member.step(loader)
        table = [None] * world
        dist.all_gather_object(table, (member.score(valid), rank, member.lr))
        order = sorted(table)
        winner, losers = order[-1][1], {r for _, r, _ in order[: max(1, world // 3)]}
        if rank == 0:
            print(f"interval {interval}: " + "  ".join(f"#{r} acc {s:.3f} lr {lr:.4f}" for s, r, lr in table) + f"  -> {losers} copy #{winner}")
        if interval < intervals - 1:
            member.exploit(winner, losers)
    dist.barrier()
    if rank == winner:
        torch.save(member.net.state_dict(), f"/tmp/pbt_{os.getppid()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
