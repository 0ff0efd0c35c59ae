"""DDPG on a small point-mass task; each process collects its own transitions."""
import argparse
import copy
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 2), nn.Tanh())

    def forward(self, s):
        return self.net(s)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, s, a):
        return self.net(torch.cat([s, a], 1)).squeeze(1)


class PointMass:
    """Position and velocity in the plane; reward is minus the distance to the origin."""

    def __init__(self, count, gen):
        self.count, self.gen = count, gen
        self.reset()

    def reset(self):
        self.state = torch.cat([2 * torch.rand(self.count, 2, generator=self.gen) - 1, torch.zeros(self.count, 2)], 1)
        self.t = 0

    def step(self, action):
        pos, vel = self.state[:, :2], self.state[:, 2:]
        vel = 0.8 * vel + 0.2 * action
        pos = (pos + vel).clamp(-2, 2)
        old, self.state = self.state, torch.cat([pos, vel], 1)
        self.t += 1
        out = old, action, -pos.norm(dim=1), self.state
        if self.t == 20:
            self.reset()
        return out


class Agent:
    def __init__(self, lr, gamma, tau):
        self.actor, self.critic = DDP(Actor()), DDP(Critic())
        self.actor_target = copy.deepcopy(self.actor.module).requires_grad_(False)
        self.critic_target = copy.deepcopy(self.critic.module).requires_grad_(False)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=lr)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=lr)
        self.gamma, self.tau = gamma, tau

    @torch.no_grad()
    def act(self, state, gen):
        action = self.actor.module(state)
        return (action + 0.2 * torch.randn(action.shape, generator=gen)).clamp(-1, 1)

    def learn(self, s, a, r, s2):
        with torch.no_grad():
            target = r + self.gamma * self.critic_target(s2, self.actor_target(s2))
        q_loss = F.mse_loss(self.critic(s, a), target)
        self.critic_opt.zero_grad()
        q_loss.backward()
        self.critic_opt.step()

        pi_loss = -self.critic(s, self.actor(s)).mean()
        self.actor_opt.zero_grad()
        pi_loss.backward()
        self.actor_opt.step()

        with torch.no_grad():
            for net, slow in ((self.actor.module, self.actor_target), (self.critic.module, self.critic_target)):
                for p, q in zip(net.parameters(), slow.parameters()):
                    q.lerp_(p, self.tau)
        return q_loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=240)
    ap.add_argument("--warmup", type=int, default=20)
    ap.add_argument("--batch", type=int, default=64)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    agent = Agent(lr=2e-3, gamma=0.9, tau=0.02)

    gen = torch.Generator().manual_seed(500 + rank)
    picker = random.Random(900 + rank)
    env = PointMass(16, gen)
    replay, q_sum = [], torch.zeros(1)
    for step in range(args.steps):
        replay.extend(zip(*env.step(agent.act(env.state, gen))))
        if step < args.warmup:
            continue
        batch = [torch.stack(part) for part in zip(*picker.sample(replay, args.batch))]
        q_sum += agent.learn(*batch)
        if (step + 1) % 40 == 0:
            dist.all_reduce(q_sum)
            if rank == 0:
                print(f"step {step + 1}: critic loss {q_sum.item() / world / 40:.4f}", flush=True)
            q_sum = torch.zeros(1)
    if rank == 0:
        torch.save(agent.actor.module.state_dict(), "actor.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
