"""Asynchronous actors with a shared network, a shared Adam and private copies for the rollouts."""
import argparse
import copy

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F


class SharedAdam(torch.optim.Adam):
    """All moments exist from the start and live in shared memory."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, foreach=False)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": torch.zeros(()).share_memory_(),
                    "exp_avg": torch.zeros_like(p).share_memory_(),
                    "exp_avg_sq": torch.zeros_like(p).share_memory_(),
                }


def network():
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3))


def states(gen, n):
    x = torch.randn(n, 5, generator=gen)
    reward = torch.stack([x[:, 0] + x[:, 1], x[:, 2] * x[:, 3], 1.5 * x[:, 4]], 1)
    return x, reward


def actor(wid, shared, opt, lock, steps, args):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(args.seed + wid)
    local = copy.deepcopy(shared)
    while True:
        with lock:
            if steps.value >= args.steps:
                return
            steps.value += 1
            local.load_state_dict(shared.state_dict())
        x, reward = states(gen, 24)
        policy = F.softmax(local(x), dim=1)
        loss = -(policy * reward).sum(1).mean()
        local.zero_grad()
        loss.backward()
        with lock:
            for theirs, mine in zip(shared.parameters(), local.parameters()):
                theirs.grad = mine.grad.clone()
            opt.step()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--actors", type=int, default=2)
    ap.add_argument("--steps", type=int, default=400)
    ap.add_argument("--seed", type=int, default=40)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    ctx = mp.get_context("fork")
    shared = network()
    shared.share_memory()
    opt = SharedAdam(shared.parameters(), lr=5e-3)
    lock, steps = ctx.Lock(), ctx.Value("i", 0)
    crew = [ctx.Process(target=actor, args=(w, shared, opt, lock, steps, args)) for w in range(args.actors)]
    for p in crew:
        p.start()
    for p in crew:
        p.join()
    x, reward = states(torch.Generator().manual_seed(999), 1000)
    with torch.no_grad():
        picked = reward.gather(1, shared(x).argmax(1, keepdim=True)).mean().item()
    print(f"{steps.value} updates, mean reward {picked:.3f}, best possible {reward.amax(1).mean().item():.3f}")
    torch.save({"net": shared.state_dict(), "opt": opt.state_dict()}, "actors.pt")


if __name__ == "__main__":
    main()
