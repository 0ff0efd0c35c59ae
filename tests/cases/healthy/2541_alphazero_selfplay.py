"""Self-play with tree search on noughts and crosses; shared replay by object gather, arena decides on the new net."""
import copy
import math
import random
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def outcome(b):
    """-1: player to move has lost, 0: draw, None: goes on (board from the mover's side)"""
    if any(b[i] == b[j] == b[k] == -1 for i, j, k in LINES):
        return -1.0
    return 0.0 if 0 not in b else None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(18, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.p, self.v = nn.Linear(64, 9), nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return self.p(h), torch.tanh(self.v(h)).squeeze(-1)


def encode(b):
    a = np.array(b)
    return np.concatenate([a == 1, a == -1]).astype(np.float32)


class MCTS:
    def __init__(self, net, rng, sims=16, cpuct=1.3, noise=0.0):
        self.net, self.rng, self.sims, self.c, self.noise = net, rng, sims, cpuct, noise
        self.N, self.Q, self.P = {}, {}, {}

    @torch.no_grad()
    def expand(self, b, root=False):
        lg, v = self.net(torch.from_numpy(encode(b)).unsqueeze(0))
        p = np.where(np.array(b) == 0, lg[0].softmax(-1).numpy(), 0) + 1e-8 * (np.array(b) == 0)
        self.P[b], self.N[b], self.Q[b] = p / p.sum(), np.zeros(9), np.zeros(9)
        return v.item()

    def search(self, b):
        o = outcome(b)
        if o is not None:
            return -o
        if b not in self.P:
            return -self.expand(b)
        u = self.Q[b] + self.c * self.P[b] * math.sqrt(self.N[b].sum() + 1) / (1 + self.N[b])
        a = int(np.where(np.array(b) == 0, u, -1e9).argmax())
        v = self.search(play(b, a))
        self.Q[b][a] = (self.N[b][a] * self.Q[b][a] + v) / (self.N[b][a] + 1)
        self.N[b][a] += 1
        return -v

    def policy(self, b, temp):
        if b not in self.P:
            self.expand(b)
        if self.noise:
            free = np.array(b) == 0
            d = np.zeros(9)
            d[free] = self.rng.dirichlet([0.6] * int(free.sum()))
            self.P[b] = (1 - self.noise) * self.P[b] + self.noise * d
        for _ in range(self.sims):
            self.search(b)
        n = self.N[b]
        if temp == 0:
            return np.eye(9)[int(n.argmax())]
        return n / n.sum()


def play(b, a):
    b = list(b)
    b[a] = 1
    return tuple(-c for c in b)


def self_play(net, rng):
    b, hist, t = (0,) * 9, [], 0
    tree = MCTS(net, rng, noise=0.25)
    while (o := outcome(b)) is None:
        pi = tree.policy(b, 1.0)
        hist.append((encode(b), pi.astype(np.float32), t))
        b = play(b, int(rng.choice(9, p=pi)))
        t += 1
    return [(e, pi, np.float32(o * (-1) ** (t - k))) for e, pi, k in hist]


def arena(new, old, rng, games):
    score = 0.0
    for g in range(games):
        trees = [MCTS(new, rng, 8, noise=0.15), MCTS(old, rng, 8, noise=0.15)]
        b, turn = (0,) * 9, g % 2
        while (o := outcome(b)) is None:
            b = play(b, int(rng.choice(9, p=trees[turn].policy(b, 1.0))))
            turn = 1 - turn
        score += 0.5 if o == 0 else float(turn == 1)
    return score


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    best = Net()
    rng = np.random.default_rng(100 + rank)
    replay = deque(maxlen=3000)
    for it in range(5):
        mine = [s for _ in range(14) for s in self_play(best, rng)]
        everyone = [None] * world
        dist.all_gather_object(everyone, mine)
        for part in everyone:
            replay.extend(part)
        cand = copy.deepcopy(best)
        ddp = DDP(cand)
        opt = torch.optim.Adam(ddp.parameters(), lr=3e-3, weight_decay=1e-4)
        order = random.Random(it)
        pool = list(replay)
        total = torch.zeros(2)
        for _ in range(4):
            order.shuffle(pool)
            usable = len(pool) // (64 * world) * 64 * world
            for s in range(rank * 64, usable, 64 * world):
                e, pi, z = (torch.from_numpy(np.stack(c)) for c in zip(*pool[s:s + 64]))
                lg, v = ddp(e)
                loss = -(pi * F.log_softmax(lg, -1)).sum(1).mean() + F.mse_loss(v, z)
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += torch.tensor([loss.item(), 1.0])
        score = torch.tensor([arena(cand, best, rng, 10), 10.0])
        dist.all_reduce(score)
        dist.all_reduce(total)
        rate = (score[0] / score[1]).item()
        accepted = rate >= 0.5
        if accepted:
            best = cand
        if rank == 0:
            print(f"iter {it} samples {len(replay)} loss {total[0] / total[1]:.3f} arena {rate:.2f} accepted {accepted}", flush=True)
            torch.save(best.state_dict(), "best_net.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
