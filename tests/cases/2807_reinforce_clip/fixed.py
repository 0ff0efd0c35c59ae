from collections import deque

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.utils import parameters_to_vector


class Chain:
    """A batch of little corridors: walk to the goal, whose side is shown in the observation."""

    def __init__(self, n_envs, seed, length=9, horizon=16):
        self.rng = np.random.default_rng(seed)
        self.n, self.length, self.horizon = n_envs, length, horizon

    def reset(self):
        self.pos = np.full(self.n, self.length // 2)
        self.goal = self.rng.integers(0, 2, self.n) * (self.length - 1)
        self.done = np.zeros(self.n, bool)
        return self.obs()

    def obs(self):
        o = np.zeros((self.n, self.length + 2), np.float32)
        o[np.arange(self.n), self.pos] = 1
        o[:, self.length] = np.where(self.goal == 0, 1, -1)
        o[:, self.length + 1] = self.rng.normal(size=self.n) * 0.1
        return o

    def step(self, act):
        live = ~self.done
        slip = self.rng.random(self.n) < 0.1
        move = np.where(slip, -1, 1) * (2 * act - 1)
        self.pos = np.where(live, np.clip(self.pos + move, 0, self.length - 1), self.pos)
        hit = live & (self.pos == self.goal)
        reward = np.where(hit, 10.0, np.where(live, -0.2, 0.0)).astype(np.float32)
        self.done |= hit
        return self.obs(), reward, live.astype(np.float32)


class ActorCritic(nn.Module):
    def __init__(self, obs, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, 2)
        self.v = nn.Linear(hidden, 1)

    def forward(self, o):
        h = self.body(o)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


class Learner:
    def __init__(self, env, net, lr=0.02, gamma=0.97, clip=0.5):
        self.env, self.net, self.gamma, self.clip = env, net, gamma, clip
        self.world = dist.get_world_size()
        self.opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)

    def rollout(self):
        obs, acts, rews, masks = [], [], [], []
        o = self.env.reset()
        for _ in range(self.env.horizon):
            ot = torch.from_numpy(o)
            with torch.no_grad():
                a = self.net(ot)[0].sample()
            o, r, m = self.env.step(a.numpy())
            obs.append(ot), acts.append(a), rews.append(torch.from_numpy(r)), masks.append(torch.from_numpy(m))
        ret, out = torch.zeros(self.env.n), []
        for r in reversed(rews):
            ret = r + self.gamma * ret
            out.append(ret)
        return torch.stack(obs), torch.stack(acts), torch.stack(out[::-1]), torch.stack(masks), torch.stack(rews)

    def loss(self, obs, acts, rets, masks):
        dist_, v = self.net(obs)
        adv = (rets - v).detach()
        per = -dist_.log_prob(acts) * adv + 0.5 * (rets - v).pow(2) - 0.01 * dist_.entropy()
        return (per * masks).sum(0).mean() / self.env.horizon

    def sync(self):
        params = list(self.net.parameters())
        vec = parameters_to_vector([p.grad for p in params])
        dist.all_reduce(vec)
        vec /= self.world
        i = 0
        for p in params:
            p.grad = vec[i:i + p.numel()].view_as(p).clone()
            i += p.numel()

    def update(self):
        obs, acts, rets, masks, rews = self.rollout()
        self.opt.zero_grad()
        self.loss(obs, acts, rets, masks).backward()
        self.sync()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.opt.step()
        return rews.sum(0).mean().item(), norm.item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(13)
    net = ActorCritic(11)
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    torch.manual_seed(700 + rank)
    learner = Learner(Chain(24, seed=300 + rank), net)
    recent = deque(maxlen=20)
    for it in range(1, 201):
        score, norm = learner.update()
        recent.append(score)
        if it % 50 == 0:
            t = torch.tensor([float(np.mean(recent))])
            dist.all_reduce(t)
            if rank == 0:
                print(f"iter {it} return {t.item() / learner.world:.3f} grad norm {norm:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
