"""Asynchronous DQN in the hogwild manner: worker processes update one Q-network in shared memory without locks.

Run with plain `python`; the script starts its workers itself.
"""
import copy
import random
import sys
from collections import deque
from typing import NamedTuple

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


class Settings(NamedTuple):
    workers: int = 2
    updates: int = 700          # per worker
    batch: int = 32
    gamma: float = 0.95
    lr: float = 0.15
    target_every: int = 25
    eps_start: float = 1.0
    eps_end: float = 0.1
    size: int = 4


class GridWorld:
    """Walk to a goal on a size x size board. Observation: own and goal position, scaled to [-1, 1]."""

    MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))

    def __init__(self, size, seed):
        self.size, self.rng = size, random.Random(seed)
        self.reset()

    def reset(self):
        self.t = 0
        self.pos = [self.rng.randrange(self.size) for _ in range(2)]
        self.goal = [self.rng.randrange(self.size) for _ in range(2)]
        while self.goal == self.pos:
            self.goal = [self.rng.randrange(self.size) for _ in range(2)]
        return self.observe()

    def observe(self):
        scale = (self.size - 1) / 2
        return torch.tensor([c / scale - 1 for c in self.pos + self.goal])

    def step(self, action):
        for axis, delta in enumerate(self.MOVES[action]):
            self.pos[axis] = min(self.size - 1, max(0, self.pos[axis] + delta))
        self.t += 1
        reached = self.pos == self.goal
        return self.observe(), (1.0 if reached else -0.02), reached, self.t >= 4 * self.size


def build_q():
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def td_loss(q, target, batch, gamma):
    obs, action, reward, nxt, terminal = batch
    with torch.no_grad():
        best = q(nxt).argmax(1, keepdim=True)  # double DQN
        future = target(nxt).gather(1, best).squeeze(1)
        goal = reward + gamma * (1 - terminal) * future
    return F.smooth_l1_loss(q(obs).gather(1, action.unsqueeze(1)).squeeze(1), goal)


def worker(index, shared_q, updates_done, cfg):
    torch.set_num_threads(1)
    torch.manual_seed(100 + index)
    rng = random.Random(200 + index)
    env, memory = GridWorld(cfg.size, seed=300 + index), deque(maxlen=5000)
    # The parameters live in shared memory; gradients are allocated here, by the first backward, and stay private.
    # SGD without momentum has no state that would have to be shared.
    optimizer = torch.optim.SGD(shared_q.parameters(), lr=cfg.lr)
    target = copy.deepcopy(shared_q).requires_grad_(False)
    obs, recent = env.reset(), deque(maxlen=50)

    for update in range(cfg.updates):
        eps = cfg.eps_start + (cfg.eps_end - cfg.eps_start) * min(1.0, update / (0.6 * cfg.updates))
        while True:  # four transitions per update once the memory holds enough
            for _ in range(4):
                if rng.random() < eps:
                    action = rng.randrange(4)
                else:
                    with torch.no_grad():
                        action = int(shared_q(obs).argmax())
                nxt, reward, terminal, timeout = env.step(action)
                memory.append((obs, action, reward, nxt, float(terminal)))
                obs = env.reset() if terminal or timeout else nxt
            if len(memory) >= 4 * cfg.batch:
                break

        columns = list(zip(*rng.sample(memory, cfg.batch)))
        batch = (torch.stack(columns[0]), torch.tensor(columns[1]), torch.tensor(columns[2]),
                 torch.stack(columns[3]), torch.tensor(columns[4]))
        loss = td_loss(shared_q, target, batch, cfg.gamma)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(shared_q.parameters(), 5.0)
        optimizer.step()
        recent.append(loss.item())

        with updates_done.get_lock():
            updates_done.value += 1
            total = updates_done.value
        if (update + 1) % cfg.target_every == 0:
            target.load_state_dict(shared_q.state_dict())
        if index == 0 and (update + 1) % 200 == 0:
            print(f"worker 0 update {update + 1} (all workers {total}) td loss {sum(recent) / len(recent):.4f} "
                  f"eps {eps:.2f}", flush=True)


@torch.no_grad()
def success_rate(q, size, episodes=150):
    env, reached = GridWorld(size, seed=1), 0
    for _ in range(episodes):
        obs = env.reset()
        while True:
            obs, _, terminal, timeout = env.step(int(q(obs).argmax()))
            if terminal or timeout:
                reached += terminal
                break
    return reached / episodes


def main():
    cfg = Settings()
    ctx = mp.get_context("spawn")
    torch.manual_seed(0)
    q = build_q()
    q.share_memory()
    before = success_rate(q, cfg.size)
    updates_done = ctx.Value("i", 0)
    processes = [ctx.Process(target=worker, args=(i, q, updates_done, cfg)) for i in range(cfg.workers)]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
    if any(p.exitcode != 0 for p in processes):
        sys.exit(f"worker exit codes: {[p.exitcode for p in processes]}")
    assert updates_done.value == cfg.workers * cfg.updates
    print(f"success rate {before:.2f} -> {success_rate(q, cfg.size):.2f} after {updates_done.value} updates")
    torch.save(q.state_dict(), "dqn.pt")


if __name__ == "__main__":
    main()
