import copy
import math
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    world: int = 2
    n_envs: int = 16
    horizon: int = 25
    updates: int = 240
    batch: int = 128
    gamma: float = 0.95
    tau: float = 0.02
    lr: float = 1e-3
    alpha_lr: float = 3e-3
    target_entropy: float = -2.0
    warmup: int = 40


class PointMass:
    """n point masses that have to be pushed to the origin; obs = (pos, vel), action = force in [-1, 1]^2."""

    def __init__(self, n, horizon):
        self.n, self.horizon = n, horizon
        self.reset()

    def reset(self):
        self.pos, self.vel, self.t = torch.rand(self.n, 2) * 4 - 2, torch.zeros(self.n, 2), 0
        return self.obs()

    def obs(self):
        return torch.cat([self.pos, self.vel], 1)

    def step(self, action):
        self.vel = 0.8 * self.vel + 0.3 * action
        self.pos = self.pos + self.vel
        self.t += 1
        reward = -(self.pos.norm(dim=1)) - 0.05 * action.pow(2).sum(1)
        return self.obs(), reward, self.t >= self.horizon


class Replay:
    def __init__(self, size):
        self.size, self.n, self.at = size, 0, 0
        self.data = torch.zeros(size, 4 + 2 + 1 + 4)

    def add(self, o, a, r, o2):
        rows = torch.cat([o, a, r[:, None], o2], 1)
        idx = (self.at + torch.arange(len(rows))) % self.size
        self.data[idx] = rows
        self.at, self.n = (self.at + len(rows)) % self.size, min(self.size, self.n + len(rows))

    def sample(self, k):
        return self.data[torch.randint(0, self.n, (k,))].split([4, 2, 1, 4], 1)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(4, 4)

    def forward(self, obs):
        mu, log_std = self.net(obs).chunk(2, -1)
        std = log_std.clamp(-4, 1).exp()
        u = mu + std * torch.randn_like(mu)
        a = u.tanh()
        logp = (-0.5 * ((u - mu) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
        logp = logp - (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)
        return a, logp, mu.tanh()


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1, self.q2 = mlp(6, 1), mlp(6, 1)

    def forward(self, o, a):
        x = torch.cat([o, a], -1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class SAC:
    def __init__(self, cfg):
        self.cfg = cfg
        self.actor, self.critic = Actor(), Critic()
        for p in [*self.actor.parameters(), *self.critic.parameters()]:
            dist.broadcast(p.data, src=0)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), cfg.lr)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), cfg.lr)
        self.alpha_opt = torch.optim.Adam([self.log_alpha], cfg.alpha_lr)

    def sync(self, params):
        params = list(params)
        flat = torch.cat([p.grad.reshape(-1) for p in params])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, g in zip(params, flat.split([p.numel() for p in params])):
            p.grad.copy_(g.view_as(p))

    def update(self, o, a, r, o2):
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            a2, logp2, _ = self.actor(o2)
            target = r.squeeze(1) + self.cfg.gamma * (torch.min(*self.target(o2, a2)) - alpha * logp2)
        q1, q2 = self.critic(o, a)
        critic_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        self.critic_opt.zero_grad()
        critic_loss.backward()
        self.sync(self.critic.parameters())
        self.critic_opt.step()

        pi, logp, _ = self.actor(o)
        self.critic.requires_grad_(False)
        actor_loss = (alpha * logp - torch.min(*self.critic(o, pi))).mean()
        self.critic.requires_grad_(True)
        self.actor_opt.zero_grad()
        actor_loss.backward()
        self.sync(self.actor.parameters())
        self.actor_opt.step()

        alpha_loss = -(self.log_alpha * (logp.detach() + self.cfg.target_entropy)).mean()
        self.alpha_opt.zero_grad()
        alpha_loss.backward()
        self.alpha_opt.step()

        with torch.no_grad():
            for t, p in zip(self.target.parameters(), self.critic.parameters()):
                t.lerp_(p, self.cfg.tau)
        return torch.stack([critic_loss.detach(), actor_loss.detach(), logp.mean().detach()])


@torch.no_grad()
def evaluate(agent, cfg):
    env = PointMass(64, cfg.horizon)
    obs, done, ret = env.reset(), False, torch.zeros(64)
    while not done:
        obs, r, done = env.step(agent.actor(obs)[2])
        ret += r
    score = torch.stack([ret.sum(), torch.tensor(64.0)])
    dist.all_reduce(score)
    return (score[0] / score[1]).item()


def worker(rank, cfg, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=cfg.world)
    torch.manual_seed(0)
    agent = SAC(cfg)
    torch.manual_seed(1000 + rank)
    env, buf = PointMass(cfg.n_envs, cfg.horizon), Replay(20000)
    obs = env.reset()
    for it in range(cfg.warmup + cfg.updates):
        with torch.no_grad():
            act = torch.rand(cfg.n_envs, 2) * 2 - 1 if it < cfg.warmup else agent.actor(obs)[0]
        nxt, rew, done = env.step(act)
        buf.add(obs, act, rew, nxt)
        obs = env.reset() if done else nxt
        if it < cfg.warmup:
            continue
        stats = agent.update(*buf.sample(cfg.batch))
        if (it - cfg.warmup) % 80 == 79:
            dist.all_reduce(stats)
            score = evaluate(agent, cfg)
            if rank == 0:
                c, a, lp = (stats / cfg.world).tolist()
                print(f"update {it - cfg.warmup + 1} critic {c:.3f} actor {a:.3f} logp {lp:.3f} return {score:.2f}", flush=True)
    if rank == 0:
        torch.save(agent.actor.state_dict(), "actor.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free_port = s.getsockname()[1]
    config = Config(updates=int(os.environ.get("UPDATES", "240")))
    mp.spawn(worker, args=(config, free_port), nprocs=config.world)
