"""Workers look at a shared network, learn on a copy and add their progress back without a lock."""
import copy

import torch
import torch.multiprocessing as mp
from torch import nn

WORKERS, ROUNDS, LOCAL = 2, 40, 4


def sample(g, n=24):
    x = torch.randn(n, 7, generator=g)
    return x, (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3]


def worker(index, shared):
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(60 + index)
    local = copy.deepcopy(shared)
    opt = torch.optim.SGD(local.parameters(), lr=0.05)
    for _ in range(ROUNDS):
        local.load_state_dict(shared.state_dict())
        before = [p.detach().clone() for p in local.parameters()]
        for _ in range(LOCAL):
            x, y = sample(g)
            loss = nn.functional.mse_loss(local(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            for s, p, b in zip(shared.parameters(), local.parameters(), before):
                s.add_((p - b) / WORKERS)
    print(f"worker {index}: {loss.item():.4f}", flush=True)


def main():
    torch.manual_seed(4)
    torch.set_num_threads(1)
    shared = nn.Sequential(nn.Linear(7, 48), nn.Tanh(), nn.Linear(48, 1))
    shared.share_memory()
    ctx = mp.get_context("fork")
    procs = [ctx.Process(target=worker, args=(k, shared)) for k in range(WORKERS)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    x, y = sample(torch.Generator().manual_seed(0), 400)
    with torch.no_grad():
        print(f"shared network: {nn.functional.mse_loss(shared(x), y).item():.4f}")


if __name__ == "__main__":
    main()
