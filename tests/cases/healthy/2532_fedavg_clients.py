"""Federated averaging simulated on several processes; clients have skewed and unequal data."""
import copy
import json
from collections import OrderedDict

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CNN(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.c1 = nn.Conv2d(1, 12, 3, padding=1)
        self.c2 = nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16 * 16, classes)

    def forward(self, x):
        return self.fc(F.relu(self.c2(F.relu(self.c1(x)))).flatten(1))


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(21))
    y = torch.randint(5, (n,), generator=g)
    return proto[y] + 1.2 * torch.randn(n, 1, 8, 8, generator=g), y


def dirichlet_split(y, clients, alpha, seed):
    r = np.random.default_rng(seed)
    parts = [[] for _ in range(clients)]
    for c in range(5):
        idx = r.permutation(np.where(y.numpy() == c)[0])
        cuts = (np.cumsum(r.dirichlet([alpha] * clients)) * len(idx)).astype(int)[:-1]
        for k, chunk in enumerate(np.split(idx, cuts)):
            parts[k].extend(chunk.tolist())
    return [np.array(sorted(p)) for p in parts]


class Client:
    def __init__(self, cid, x, y, epochs=2, bs=16, lr=0.05):
        self.cid, self.x, self.y, self.epochs, self.bs, self.lr = cid, x, y, epochs, bs, lr

    def fit(self, weights, round_no):
        model = CNN()
        model.load_state_dict(weights)
        opt = torch.optim.SGD(model.parameters(), lr=self.lr * 0.95 ** round_no, momentum=0.9)
        g = torch.Generator().manual_seed(10_000 * round_no + self.cid)
        total, steps = 0.0, 0
        for _ in range(self.epochs):
            for idx in torch.randperm(len(self.y), generator=g).split(self.bs):
                loss = F.cross_entropy(model(self.x[idx]), self.y[idx])
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.item()
                steps += 1
        return model.state_dict(), len(self.y), total / steps


class Aggregator:
    def __init__(self, template):
        self.acc = OrderedDict((k, torch.zeros_like(v, dtype=torch.float64)) for k, v in template.items())
        self.meta = torch.zeros(3, dtype=torch.float64)

    def add(self, sd, n, loss):
        for k, v in sd.items():
            self.acc[k] += v.double() * n
        self.meta += torch.tensor([n, loss * n, 1.0], dtype=torch.float64)

    def finish(self):
        dist.all_reduce(self.meta)
        for v in self.acc.values():
            dist.all_reduce(v)
        n = self.meta[0]
        return OrderedDict((k, (v / n).float()) for k, v in self.acc.items()), (self.meta[1] / n).item(), int(self.meta[2])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = images(2400, 1)
    tx, ty = images(600, 2)
    parts = dirichlet_split(y, 12, 0.5, 3)
    clients = {c: Client(c, x[p], y[p]) for c, p in enumerate(parts) if c % world == rank and len(p) > 0}
    nonempty = [c for c, p in enumerate(parts) if len(p) > 0]
    torch.manual_seed(rank)
    server = CNN()
    weights = server.state_dict()
    for v in weights.values():
        dist.broadcast(v, src=0)
    weights = copy.deepcopy(weights)
    picker = np.random.default_rng(77)
    history = []
    for rnd in range(14):
        chosen = picker.choice(nonempty, size=4, replace=False)
        agg = Aggregator(weights)
        for c in chosen:
            if c in clients:
                agg.add(*clients[c].fit(weights, rnd))
        weights, loss, count = agg.finish()
        server.load_state_dict(weights)
        with torch.no_grad():
            mine = slice(rank, None, world)
            ok = (server(tx[mine]).argmax(1) == ty[mine]).sum().double()
        dist.all_reduce(ok)
        history.append({"round": rnd, "clients": count, "train_loss": round(loss, 4), "acc": round(ok.item() / len(ty), 4)})
        if rank == 0:
            print(json.dumps(history[-1]), flush=True)
    if rank == 0:
        torch.save(weights, "fed_model.pt")
        with open("history.json", "w") as f:
            json.dump(history, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
