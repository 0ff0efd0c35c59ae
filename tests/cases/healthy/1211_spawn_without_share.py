"""Two spawned workers train one network; torch's pickler moves its storage to shared memory by itself."""
import torch
import torch.multiprocessing as mp
import torch.nn as nn


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return x, (x[:, :5].sum(1) > x[:, 5:].sum(1)).long()


def work(rank, net, steps, lr):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(50 + rank)
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    x, y = data(600, 1)
    for _ in range(steps):
        pick = torch.randint(0, len(x), (24,), generator=gen)
        loss = nn.functional.cross_entropy(net(x[pick]), y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"worker {rank}: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    mp.spawn(work, args=(net, 120, 0.1), nprocs=2)
    x, y = data(400, 2)
    with torch.no_grad():
        print(f"accuracy {(net(x).argmax(1) == y).float().mean().item():.3f}")
