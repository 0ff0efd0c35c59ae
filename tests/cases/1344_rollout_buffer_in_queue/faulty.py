"""Actors generate demonstrations in their own processes, one learner imitates them."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

OBS, ACTIONS, LENGTH = 8, 4, 64


def expert(obs):
    return (obs[:, :ACTIONS] + 0.5 * obs[:, ACTIONS:]).argmax(1)


def actor(number, rollouts, queue, finished):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(300 + number)
    obs = torch.zeros(LENGTH, OBS)
    for _ in range(rollouts):
        obs[0] = torch.randn(OBS, generator=gen)
        for t in range(1, LENGTH):
            obs[t] = 0.3 * obs[t - 1] + torch.randn(OBS, generator=gen)
        best = expert(obs)
        queue.put((obs, best))
    finished.wait()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS, 64), nn.ReLU(), nn.Linear(64, ACTIONS))

    def forward(self, obs):
        return self.net(obs)


def learn(policy, queue, updates, lr):
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    recent = 0.0
    for update in range(1, updates + 1):
        obs, best = queue.get()
        loss = F.cross_entropy(policy(obs), best)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent = loss.item() if update == 1 else 0.95 * recent + 0.05 * loss.item()
        if update % 100 == 0:
            print(f"update {update}: loss {recent:.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--actors", type=int, default=2)
    ap.add_argument("--rollouts", type=int, default=200)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ctx = mp.get_context("spawn")
    queue, finished = ctx.Queue(maxsize=16), ctx.Event()
    actors = [ctx.Process(target=actor, args=(n, args.rollouts, queue, finished)) for n in range(args.actors)]
    for process in actors:
        process.start()
    policy = Policy()
    learn(policy, queue, args.actors * args.rollouts, args.lr)
    finished.set()
    for process in actors:
        process.join()

    test = torch.randn(500, OBS, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = (policy(test).argmax(1) == expert(test)).float().mean().item()
    print(f"agrees with the expert in {100 * right:.1f}% of the states", flush=True)


if __name__ == "__main__":
    main()
