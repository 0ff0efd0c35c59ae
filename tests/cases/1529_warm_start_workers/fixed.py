"""Lock-free workers on one shared network that starts from pretrained weights."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

WEIGHTS = "warm_start.pt"


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        return self.net(x)


def episodes(gen, n, shift):
    """Four actions; the best one is the largest of four sums of neighbours."""
    x = torch.randn(n, 8, generator=gen)
    value = x.view(n, 4, 2).sum(2)
    return x, value.roll(shift, dims=1).argmax(1)


def pretrain(seed):
    torch.manual_seed(seed)
    net = Scorer()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(seed)
    for _ in range(40):
        x, best = episodes(gen, 32, shift=1)
        opt.zero_grad()
        F.cross_entropy(net(x), best).backward()
        opt.step()
    torch.save(net.state_dict(), WEIGHTS)


def work(wid, net, args):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(1000 + wid)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    for it in range(args.iters):
        x, best = episodes(gen, 32, shift=0)
        loss = F.cross_entropy(net(x), best)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 100 == 0:
            print(f"worker {wid} iteration {it}: loss {loss.item():.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--iters", type=int, default=400)
    ap.add_argument("--lr", type=float, default=0.2)
    args = ap.parse_args()

    ctx = mp.get_context("fork")
    first = ctx.Process(target=pretrain, args=(0,))
    first.start()
    first.join()

    shared = Scorer()
    shared.load_state_dict(torch.load(WEIGHTS), assign=True)
    shared.share_memory()

    crew = [ctx.Process(target=work, args=(w, shared, args)) for w in range(args.workers)]
    for p in crew:
        p.start()
    for p in crew:
        p.join()

    x, best = episodes(torch.Generator().manual_seed(7), 1000, shift=0)
    with torch.no_grad():
        acc = (shared(x).argmax(1) == best).float().mean().item()
    print(f"best action found in {100 * acc:.1f}% of the states")
    torch.save(shared.state_dict(), "scorer.pt")


if __name__ == "__main__":
    main()
