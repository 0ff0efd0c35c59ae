"""Deep ensemble: every process trains its own network on its own bootstrap sample; only the predictions are combined."""
import os

import torch
import torch.distributed as dist
from torch import nn


def concrete(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 6, generator=g) * 2 - 1
    y = (3 * x[:, 0]).sin() + x[:, 1] * x[:, 2] + 0.1 * torch.randn(n, generator=g)
    return x, y[:, None]


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        mu, s = self.net(x).chunk(2, 1)
        return mu, nn.functional.softplus(s) + 1e-4


def main():
    dist.init_process_group("gloo")
    rank, members = dist.get_rank(), dist.get_world_size()
    x, y = concrete(600, 1)
    xt, yt = concrete(200, 2)

    torch.manual_seed(1000 + rank)  # members differ in their start and in their sample
    member = Gaussian()
    boot = torch.randint(0, len(x), (len(x),))
    x, y = x[boot], y[boot]
    opt = torch.optim.Adam(member.parameters(), lr=3e-3)
    nll = nn.GaussianNLLLoss()
    member.train()
    for epoch in range(8):
        perm = torch.randperm(len(x))
        total = 0.0
        for idx in perm.split(60):
            mu, var = member(x[idx])
            loss = nll(mu, y[idx], var)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        print(f"member {rank} epoch {epoch} nll {total / 10:.3f}", flush=True)

    member.eval()
    with torch.no_grad():
        mu, var = member(xt)
        single = nll(mu, yt, var).item()
        stats = torch.stack([mu, var + mu * mu])
        dist.all_reduce(stats)
        stats /= members
        mix_mu, mix_var = stats[0], stats[1] - stats[0] ** 2
        ensemble = nll(mix_mu, yt, mix_var).item()
    scores = [None] * members
    dist.all_gather_object(scores, single)
    torch.save(member.state_dict(), f"/tmp/ensemble_{os.getppid()}_member{rank}.pt")
    if rank == 0:
        print("members:", " ".join(f"{s:.3f}" for s in scores), f"ensemble: {ensemble:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
