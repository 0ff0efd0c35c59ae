"""Continual learning with rehearsal: the memory of old samples grows to its capacity and stays there; features of the last steps are kept in a
deque for a drift statistic (detached)."""
from collections import deque
import random
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Reservoir:
    def __init__(self, cap, seed):
        self.cap, self.seen, self.items = cap, 0, []
        self.rng = random.Random(seed)

    def add(self, x, y):
        for a, b in zip(x, y):
            self.seen += 1
            if len(self.items) < self.cap:
                self.items.append((a.clone(), b.clone()))
            else:
                j = self.rng.randrange(self.seen)
                if j < self.cap:
                    self.items[j] = (a.clone(), b.clone())

    def sample(self, k):
        pick = self.rng.sample(range(len(self.items)), k)
        xs, ys = zip(*(self.items[i] for i in pick))
        return torch.stack(xs), torch.stack(ys)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.c = nn.Linear(32, 6)

    def forward(self, x):
        z = self.f(x)
        return self.c(z.relu()), z


def task_batch(task, g):
    centers = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    y = torch.randint(2 * task, 2 * task + 2, (32,), generator=g)
    return centers[y] + torch.randn(32, 64, generator=g), y


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = DDP(Net())
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    mem = Reservoir(cap=1500, seed=rank)
    feats = deque(maxlen=40)
    g = torch.Generator().manual_seed(rank + 10)
    for task in range(3):
        for it in range(40):
            x, y = task_batch(task, g)
            if mem.seen >= 64:
                mx, my = mem.sample(32)
            else:
                mx, my = x.flip(0), y.flip(0)
            out, z = net(torch.cat([x, mx]))
            loss = F.cross_entropy(out, torch.cat([y, my]))
            opt.zero_grad()
            loss.backward()
            opt.step()
            mem.add(x, y)
            feats.append(z.detach())
        drift = (torch.stack(list(feats)[-10:]).mean((0, 1)) - torch.stack(list(feats)[:10]).mean((0, 1))).norm()
        s = torch.stack([loss.detach(), drift])
        dist.all_reduce(s)
        if rank == 0:
            print(f"task {task}: loss {s[0] / world:.3f} drift {s[1] / world:.3f} memory {len(mem.items)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
