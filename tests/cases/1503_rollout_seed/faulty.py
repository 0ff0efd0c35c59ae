"""Policy gradient on a windy corridor; every process steps its own batch of environments."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


class WindyCorridor:
    """The agent has to reach the right end; wind pushes it back from time to time."""

    def __init__(self, count, length=7, seed=0):
        self.count, self.length = count, length
        self.rng = torch.Generator().manual_seed(seed)

    def reset(self):
        self.pos = torch.randint(0, self.length - 2, (self.count,), generator=self.rng)
        self.wind = 0.3 * torch.rand(self.count, generator=self.rng)
        return self.observe()

    def observe(self):
        return torch.stack([self.pos / self.length, self.wind, torch.ones(self.count)], 1)

    def step(self, action):
        gust = torch.rand(self.count, generator=self.rng) < self.wind
        move = torch.where(gust, -1, 2 * action - 1)
        self.pos = (self.pos + move).clamp(0, self.length - 1)
        reward = (self.pos == self.length - 1).float() - 0.05
        return self.observe(), reward


class Policy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, obs):
        return self.net(obs)


@torch.no_grad()
def rollout(policy, env, horizon):
    obs, seen, acts, rewards = env.reset(), [], [], []
    for _ in range(horizon):
        action = Categorical(logits=policy(obs)).sample()
        seen.append(obs)
        acts.append(action)
        obs, r = env.step(action)
        rewards.append(r)
    returns, running = [], torch.zeros(env.count)
    for r in reversed(rewards):
        running = r + 0.95 * running
        returns.insert(0, running)
    return torch.stack(seen), torch.stack(acts), torch.stack(returns), torch.stack(rewards).sum(0).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=40)
    ap.add_argument("--envs", type=int, default=16)
    ap.add_argument("--horizon", type=int, default=20)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    seed = args.seed
    torch.manual_seed(seed)
    env = WindyCorridor(args.envs, seed=seed)
    policy = Policy()
    model = DDP(policy)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)

    for update in range(args.updates):
        obs, act, ret, score = rollout(policy, env, args.horizon)
        adv = ret - ret.mean(1, keepdim=True)
        logp = Categorical(logits=model(obs.flatten(0, 1))).log_prob(act.flatten())
        loss = -(logp * adv.flatten()).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (update + 1) % 10 == 0:
            dist.all_reduce(score)
            if rank == 0:
                print(f"update {update + 1}: mean episode reward {score.item() / world:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
