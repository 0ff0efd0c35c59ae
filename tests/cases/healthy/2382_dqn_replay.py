"""Double DQN: every process plays its own games into its own replay memory, the Q network is shared by DDP."""
import argparse
import collections
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

Transition = collections.namedtuple("Transition", "s a r s2 done")


class KeyDoor:
    """Walk on a line: take the key on one side, then reach the door on the other side."""
    SIZE = 9

    def __init__(self, rng):
        self.rng = rng
        self.reset()

    def reset(self):
        self.pos, self.key, self.t = self.rng.randrange(2, 7), False, 0
        self.key_left = self.rng.random() < 0.5
        return self.observe()

    def observe(self):
        o = np.zeros(self.SIZE + 2, dtype=np.float32)
        o[self.pos] = 1.0
        o[-2], o[-1] = float(self.key), float(self.key_left)
        return o

    def step(self, action):
        self.pos = min(max(self.pos + (1 if action else -1), 0), self.SIZE - 1)
        self.t += 1
        reward, done = -0.02, self.t >= 40
        key_at, door_at = (0, self.SIZE - 1) if self.key_left else (self.SIZE - 1, 0)
        if not self.key and self.pos == key_at:
            self.key, reward = True, 0.5
        elif self.key and self.pos == door_at:
            reward, done = 1.0, True
        return self.observe(), reward, done


class ReplayMemory:
    def __init__(self, capacity, rng):
        self.memory, self.rng = collections.deque(maxlen=capacity), rng

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, n):
        t = Transition(*zip(*self.rng.sample(self.memory, n)))
        return (torch.from_numpy(np.stack(t.s)), torch.tensor(t.a), torch.tensor(t.r, dtype=torch.float32),
                torch.from_numpy(np.stack(t.s2)), torch.tensor(t.done, dtype=torch.float32))

    def __len__(self):
        return len(self.memory)


class DuelingQ(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_obs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.value, self.adv = nn.Linear(64, 1), nn.Linear(64, n_act)

    def forward(self, x):
        h = self.body(x)
        a = self.adv(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


def select_action(net, obs, eps, rng):
    if rng.random() < eps:
        return rng.randrange(2)
    with torch.no_grad():
        return int(net(torch.from_numpy(obs)[None]).argmax(1))


def optimize(policy, target, memory, optimizer, args):
    s, a, r, s2, done = memory.sample(args.batch)
    q = policy(s).gather(1, a[:, None]).squeeze(1)
    with torch.no_grad():
        best = policy.module(s2).argmax(1, keepdim=True)
        goal = r + args.gamma * (1 - done) * target(s2).gather(1, best).squeeze(1)
    loss = F.smooth_l1_loss(q, goal)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy.parameters(), 10)
    optimizer.step()
    return loss.item()


def play(net, rng, episodes):
    total = 0.0
    for _ in range(episodes):
        env = KeyDoor(rng)
        obs, done = env.reset(), False
        while not done:
            obs, r, done = env.step(select_action(net, obs, 0.0, rng))
            total += r
    return total


def evaluate(policy, seed, rank, world, episodes=40):
    policy.eval()
    mine = len(range(rank, episodes, world))
    t = torch.tensor([play(policy.module, random.Random(seed * 1000 + rank), mine), float(mine)], dtype=torch.float64)
    dist.all_reduce(t)
    policy.train()
    return (t[0] / t[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--tau", type=float, default=0.02)
    parser.add_argument("--train-every", type=int, default=2)
    parser.add_argument("--eval-every", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = random.Random(args.seed + 7919 * rank)
    torch.manual_seed(args.seed)

    policy = DistributedDataParallel(DuelingQ(KeyDoor.SIZE + 2, 2))
    target = DuelingQ(KeyDoor.SIZE + 2, 2)
    target.load_state_dict(policy.module.state_dict())
    target.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, amsgrad=True)
    memory = ReplayMemory(2000, rng)

    env = KeyDoor(rng)
    obs, best = env.reset(), -float("inf")
    for step in range(1, args.steps + 1):
        eps = max(0.05, 1.0 - step / 900)
        action = select_action(policy.module, obs, eps, rng)
        nxt, reward, done = env.step(action)
        # running out of time does not end the value of a state, reaching the door does
        memory.push(obs, action, reward, nxt, done and env.t < 40)
        obs = env.reset() if done else nxt

        if step > args.warmup and step % args.train_every == 0:
            loss = optimize(policy, target, memory, optimizer, args)
            with torch.no_grad():
                for pt, pp in zip(target.parameters(), policy.module.parameters()):
                    pt.lerp_(pp, args.tau)
        if step % args.eval_every == 0:
            score = evaluate(policy, args.seed + step, rank, world)
            if rank == 0:
                print(f"step {step} eps {eps:.2f} loss {loss:.4f} mean return {score:.3f} replay {len(memory)}")
                if score > best:
                    best = score
                    torch.save({"q": policy.module.state_dict(), "step": step, "score": score}, "dqn_best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
