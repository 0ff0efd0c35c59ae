"""Small convolutional classifier, 'nodes' of two processes, hand-written gradient averaging."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CFG = {"epochs": 3, "batch": 8, "lr": 0.05, "gpus_per_node": 2, "classes": 4}


class Topology:
    def __init__(self, per_node):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.per_node = per_node
        self.node = self.rank // per_node
        for n in range(self.world // per_node):
            members = list(range(n * per_node, (n + 1) * per_node))
            group = dist.new_group(members)
            if n == self.node:
                self.local = group
        self.everyone = dist.group.WORLD


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3, padding=1)
        self.c2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16 * 4, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.fc(x.flatten(1))


def stripes(n=256, classes=4):
    g = torch.Generator().manual_seed(3)
    y = torch.randint(0, classes, (n,), generator=g)
    x = 0.5 * torch.randn(n, 1, 8, 8, generator=g)
    for i, c in enumerate(y.tolist()):
        if c < 2:
            x[i, 0, c::2] += 1
        else:
            x[i, 0, :, c % 2 :: 2] += 1
    return x, y


def average(model, group):
    size = dist.get_world_size(group)
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=group)
    flat /= size
    offset = 0
    for g in grads:
        g.copy_(flat[offset : offset + g.numel()].view_as(g))
        offset += g.numel()


def main():
    dist.init_process_group("gloo")
    topo = Topology(CFG["gpus_per_node"])
    torch.manual_seed(0)
    model = Net(CFG["classes"])
    opt = torch.optim.SGD(model.parameters(), lr=CFG["lr"], momentum=0.9)
    x, y = stripes()

    for epoch in range(CFG["epochs"]):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[topo.rank :: topo.world]
        seen = torch.zeros(2)
        for idx in order.split(CFG["batch"]):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            average(model, topo.everyone)
            opt.step()
            seen += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(seen, group=topo.everyone)
        if topo.rank == 0:
            print(f"epoch {epoch}: mean loss {seen[0] / seen[1]:.4f}")
    if topo.rank == 0 and os.environ.get("SAVE"):
        torch.save(model.state_dict(), "stripes.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
