"""Synchronous policy gradient with hand-written gradient averaging and vectorised environments."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn


class TargetField:
    """A batch of point agents that must step onto a target; an agent restarts when it arrives or times out."""

    MOVES = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])

    def __init__(self, n, seed, horizon=10, reach=0.6):
        self.n, self.horizon, self.reach = n, horizon, reach
        self.gen = torch.Generator().manual_seed(seed)
        self.pos, self.goal = torch.zeros(n, 2), torch.zeros(n, 2)
        self.t, self.ret = torch.zeros(n), torch.zeros(n)
        self.restart(torch.ones(n, dtype=torch.bool))

    def restart(self, mask):
        k = int(mask.sum())
        self.pos[mask] = torch.rand(k, 2, generator=self.gen) * 4 - 2
        self.goal[mask] = torch.rand(k, 2, generator=self.gen) * 4 - 2
        self.t[mask] = 0
        self.ret[mask] = 0

    def observe(self):
        return torch.cat([self.pos, self.goal - self.pos], dim=1)

    def step(self, actions):
        before = (self.goal - self.pos).norm(dim=1)
        self.pos += 0.7 * self.MOVES[actions]
        after = (self.goal - self.pos).norm(dim=1)
        arrived = after < self.reach
        reward = (before - after) + 2.0 * arrived.float() - 0.05
        self.t += 1
        self.ret += reward
        done = arrived | (self.t >= self.horizon)
        finished = [{"ret": r, "len": length, "ok": ok} for r, length, ok in zip(
            self.ret[done].tolist(), self.t[done].tolist(), arrived[done].tolist())]
        self.restart(done)
        return reward, done.float(), finished


class Policy(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi, self.v = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


class EpisodeStats:
    """Recent episodes of all processes."""

    def __init__(self, window):
        self.window = window
        self.episodes = []

    def add(self, finished):
        self.episodes.extend(finished)

    def summary(self):
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.episodes)
        recent = [e for part in gathered for e in part[-self.window:]]
        n = max(len(recent), 1)
        return (sum(e["ret"] for e in recent) / n, sum(e["len"] for e in recent) / n,
                sum(e["ok"] for e in recent) / n)


def average_gradients(model, world):
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= world
    for g, chunk in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(chunk.view_as(g))


def collect(env, policy, steps, gamma, stats):
    logps, values, rewards, dones, ents = [], [], [], [], []
    for _ in range(steps):
        pi, value = policy(env.observe())
        action = pi.sample()
        reward, done, finished = env.step(action)
        stats.add(finished)
        logps.append(pi.log_prob(action))
        ents.append(pi.entropy())
        values.append(value)
        rewards.append(reward)
        dones.append(done)
    with torch.no_grad():
        ret = policy(env.observe())[1]
    returns = []
    for reward, done in zip(reversed(rewards), reversed(dones)):
        ret = reward + gamma * ret * (1 - done)
        returns.append(ret)
    return torch.stack(logps), torch.stack(values), torch.stack(returns[::-1]), torch.stack(ents)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=300)
    ap.add_argument("--envs", type=int, default=64)
    ap.add_argument("--steps", type=int, default=8)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--gamma", type=float, default=0.95)
    ap.add_argument("--window", type=int, default=200)
    ap.add_argument("--seed", type=int, default=23)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    policy = Policy()
    for p in policy.parameters():
        dist.broadcast(p.data, src=0)
    torch.manual_seed(args.seed + 1 + rank)
    env = TargetField(args.envs, seed=args.seed * 100 + rank)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    stats = EpisodeStats(args.window)

    began = time.perf_counter()
    for update in range(1, args.updates + 1):
        logp, value, returns, entropy = collect(env, policy, args.steps, args.gamma, stats)
        adv = (returns - value).detach()
        loss = -(logp * adv).mean() + 0.5 * (returns - value).pow(2).mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(policy, world)
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        mean_ret, mean_len, success = stats.summary()
        if rank == 0 and update % 40 == 0:
            print(f"update {update} return {mean_ret:.3f} length {mean_len:.1f} success {success:.2f} "
                  f"({(time.perf_counter() - began):.1f}s)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
