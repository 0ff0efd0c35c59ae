"""Train a few ensemble members in parallel processes and average their predictions."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn


def waves(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(n, 1, generator=g) - 3
    return x, torch.sin(2 * x) + 0.1 * torch.randn(n, 1, generator=g)


def fit_member(index, results, steps, grid_points):
    torch.set_num_threads(1)
    torch.manual_seed(1000 + index)
    net = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    x, y = waves(512, index)
    for step in range(steps):
        pick = torch.randint(0, len(x), (64,))
        loss = (net(x[pick]) - y[pick]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    grid = torch.linspace(-3, 3, grid_points)[:, None]
    with torch.no_grad():
        curve = net(grid).squeeze(1).numpy()
    results.put((index, loss.item(), curve))
    print(f"member {index} done, loss {loss.item():.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--members", type=int, default=2)
    ap.add_argument("--steps", type=int, default=150)
    ap.add_argument("--grid", type=int, default=60000)
    args = ap.parse_args()
    ctx = mp.get_context("spawn")
    results = ctx.Queue()
    procs = [ctx.Process(target=fit_member, args=(i, results, args.steps, args.grid)) for i in range(args.members)]
    for p in procs:
        p.start()
    curves = [results.get() for _ in procs]
    for p in procs:
        p.join()
    mean = sum(torch.from_numpy(c) for _, _, c in curves) / len(curves)
    truth = torch.sin(2 * torch.linspace(-3, 3, args.grid))
    print(f"ensemble rmse {(mean - truth).pow(2).mean().sqrt().item():.4f}")


if __name__ == "__main__":
    main()
