"""Mixture of experts: one expert per process, tokens are exchanged with all_to_all."""
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn


class ExpertParallel(nn.Module):
    """every token goes to the expert of its group; groups have equal size, so no capacity is needed"""

    def __init__(self, dim, rank, world):
        super().__init__()
        self.world = world
        gen = torch.Generator().manual_seed(1000 + rank)
        self.expert = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        with torch.no_grad():
            for p in self.expert.parameters():
                p.copy_(torch.randn(p.shape, generator=gen) * 0.2)

    def forward(self, x):
        order = x[:, 0].argsort()
        sent = x[order].contiguous()
        got = dnn.all_to_all_single(torch.empty_like(sent), sent)
        done = self.expert(got).contiguous()
        back = dnn.all_to_all_single(torch.empty_like(done), done)
        out = torch.empty_like(back)
        out[order] = back
        return x + out


class MoE(nn.Module):
    def __init__(self, rank, world, dim=12):
        super().__init__()
        self.inp = nn.Linear(6, dim)
        self.experts = ExpertParallel(dim, rank, world)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        return self.out(self.experts(torch.tanh(self.inp(x))))

    def replicated(self):
        return [*self.inp.parameters(), *self.out.parameters()]


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = MoE(rank, world)
    for p in net.replicated():
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(50):
        x = torch.randn(32, 6, generator=gen)
        y = torch.where(x[:, :1] > 0, x[:, 1:2] * 2, x[:, 2:3].sin())
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        for p in net.replicated():
            dist.all_reduce(p.grad)
            p.grad /= world
        for p in net.experts.parameters():  # already summed over the ranks' tokens by the exchange
            p.grad /= world
        opt.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item() / world:.4f}")
    torch.save(net.experts.state_dict(), f"expert_{rank}.pt")
    if rank == 0:
        torch.save({k: v for k, v in net.state_dict().items() if not k.startswith("experts.")}, "shared.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
