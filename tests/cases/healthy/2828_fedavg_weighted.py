import copy

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Client:
    def __init__(self, cid, n, labels):
        rng = np.random.default_rng(100 + cid)
        centres = np.random.default_rng(0).normal(size=(6, 20)) * 1.2
        y = rng.choice(labels, n)
        self.x = torch.tensor(centres[y] + rng.normal(size=(n, 20)), dtype=torch.float32)
        self.y = torch.tensor(y)
        self.n, self.g = n, torch.Generator().manual_seed(500 + cid)

    def local_update(self, net, epochs, lr, mu, anchor):
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        net.train()
        last = 0.0
        for _ in range(epochs):
            for idx in torch.randperm(self.n, generator=self.g).split(32):
                prox = sum((p - a).pow(2).sum() for p, a in zip(net.parameters(), anchor))
                loss = F.cross_entropy(net(self.x[idx]), self.y[idx]) + 0.5 * mu * prox
                opt.zero_grad()
                loss.backward()
                opt.step()
                last = loss.item()
        return last


class Server:
    """Every process plays the server too: aggregation is a weighted all_reduce."""

    def __init__(self, net):
        self.net = net
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def aggregate(self, updates):
        total = torch.tensor(float(sum(n for n, _ in updates)))
        dist.all_reduce(total)
        merged = {}
        for key, ref in self.net.state_dict().items():
            acc = torch.zeros_like(ref)
            for n, state in updates:
                acc += state[key] * (n / total.item())
            dist.all_reduce(acc)
            merged[key] = acc
        self.net.load_state_dict(merged)


def make_clients(rank, world, count=8):
    rng = np.random.default_rng(3)
    sizes = rng.integers(80, 600, count)
    label_sets = [rng.choice(6, 3, replace=False) for _ in range(count)]
    return [Client(c, int(sizes[c]), label_sets[c]) for c in range(rank, count, world)]


def build():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 6))


def main(rounds=15):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = build()
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    server = Server(net)
    clients = make_clients(rank, world)
    test = Client(99, 1200, np.arange(6))
    for r in range(rounds):
        chosen = np.random.default_rng(1000 + r).random(8) < 0.8
        updates, losses = [], []
        for j, c in enumerate(clients):
            if not chosen[rank + j * world] and j > 0:
                continue
            local = copy.deepcopy(net)
            anchor = [p.detach().clone() for p in net.parameters()]
            losses.append(c.local_update(local, epochs=3, lr=0.05, mu=0.01, anchor=anchor))
            updates.append((c.n, local.state_dict()))
        server.aggregate(updates)
        if r % 5 == 4:
            own = slice(rank, None, world)
            net.eval()
            with torch.no_grad():
                hit = (net(test.x[own]).argmax(1) == test.y[own]).float().sum()
            s = torch.tensor([hit.item(), float(sum(losses)), float(len(losses))])
            dist.all_reduce(s)
            if rank == 0:
                print(f"round {r + 1} acc {s[0].item() / test.n:.4f} client loss {(s[1] / s[2]).item():.4f} clients {int(s[2])}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "global.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
