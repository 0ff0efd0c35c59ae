"""Highway network; the embedding table is excluded from averaging because it is frozen."""
import os

import torch
import torch.distributed as dist
from torch import nn


class Highway(nn.Module):
    def __init__(self, dim=16, depth=5):
        super().__init__()
        self.table = nn.Embedding(30, dim)
        self.carry = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(depth))
        self.transform = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(depth))

    def forward(self, ids):
        h = self.table(ids).mean(1)
        for c, t in zip(self.carry, self.transform):
            gate = torch.sigmoid(c(h))
            h = gate * torch.tanh(t(h)) + (1 - gate) * h
        return h


class Replica:
    def __init__(self, net, exclude=()):
        self.net, self.exclude = net, set(exclude)
        self.by_name = dict(net.named_parameters())
        for p in self.by_name.values():
            dist.broadcast(p.data, src=0)

    def trainable(self):
        return [name for name in self.by_name if name not in self.exclude]

    def parameters(self):
        return [self.by_name[n] for n in sorted(self.trainable())]

    def average_gradients(self):
        for name in self.trainable():
            grad = self.by_name[name].grad
            dist.all_reduce(grad)
            grad.div_(dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = Highway()
    net.table.weight.requires_grad_(False)
    replica = Replica(net, exclude=["table.weight"])
    opt = torch.optim.Adam(replica.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(rank)
    goal = torch.randn(30, 16, generator=torch.Generator().manual_seed(5)).tanh() * 0.6
    for step in range(50):
        ids = torch.randint(0, 30, (32, 3), generator=gen)
        loss = nn.functional.mse_loss(net(ids), goal[ids].mean(1))
        opt.zero_grad()
        loss.backward()
        replica.average_gradients()
        opt.step()
        if step % 10 == 9:
            mean = loss.detach()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
