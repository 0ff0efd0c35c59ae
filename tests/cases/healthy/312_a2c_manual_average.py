"""Advantage actor-critic on a vectorised balancing pole; gradients averaged by hand through one flat buffer."""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical


class VecPole:
    def __init__(self, num_envs, seed):
        self.rng, self.n = np.random.default_rng(seed), num_envs
        self.state = self._fresh(num_envs)
        self.length = np.zeros(num_envs)

    def _fresh(self, n):
        return self.rng.uniform(-0.05, 0.05, (n, 4))

    def step(self, action):
        x, v, th, w = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        tmp = (force + 0.05 * w**2 * np.sin(th)) / 1.1
        acc_th = (9.8 * np.sin(th) - np.cos(th) * tmp) / (0.5 * (4 / 3 - 0.1 * np.cos(th) ** 2 / 1.1))
        acc_x = tmp - 0.05 * acc_th * np.cos(th) / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * acc_x, th + 0.02 * w, w + 0.02 * acc_th], 1)
        self.length += 1
        done = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.21) | (self.length >= 200)
        finished = self.length[done].tolist()
        self.state[done] = self._fresh(int(done.sum()))
        self.length[done] = 0
        return np.ones(self.n), done, finished


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, obs):
        h = self.body(obs)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def sync_params(module):
    for p in module.parameters():
        dist.broadcast(p.data, src=0)


def average_grads(module):
    grads = [p.grad for p in module.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for g in grads:
        g.copy_(flat[offset : offset + g.numel()].view_as(g))
        offset += g.numel()


def mpi_avg(values):
    t = torch.tensor([float(np.sum(values)), float(len(values))])
    dist.all_reduce(t)
    return (t[0] / t[1].clamp(min=1)).item()


def main(updates=30, horizon=16, gamma=0.98, seed=100):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(seed + 10000 * rank)
    ac = ActorCritic()
    sync_params(ac)
    env = VecPole(8, seed + rank)
    optim = torch.optim.RMSprop(ac.parameters(), lr=2e-3)
    lengths = []
    for update in range(updates):
        logps, values, rewards, masks, entropies = [], [], [], [], []
        for _ in range(horizon):
            dist_pi, value = ac(torch.as_tensor(env.state, dtype=torch.float32))
            action = dist_pi.sample()
            reward, done, finished = env.step(action.numpy())
            lengths += finished
            logps.append(dist_pi.log_prob(action))
            entropies.append(dist_pi.entropy())
            values.append(value)
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            masks.append(torch.as_tensor(1.0 - done, dtype=torch.float32))
        with torch.no_grad():
            ret = ac(torch.as_tensor(env.state, dtype=torch.float32))[1]
        returns = []
        for r, m in zip(reversed(rewards), reversed(masks)):
            ret = r + gamma * ret * m
            returns.insert(0, ret)
        returns, values = torch.stack(returns), torch.stack(values)
        adv = returns - values
        loss = -(torch.stack(logps) * adv.detach()).mean() + 0.5 * adv.pow(2).mean() - 0.01 * torch.stack(entropies).mean()
        optim.zero_grad()
        loss.backward()
        average_grads(ac)
        nn.utils.clip_grad_norm_(ac.parameters(), 0.5)
        optim.step()
        if (update + 1) % 10 == 0:
            mean_len = mpi_avg(lengths)
            lengths.clear()
            if rank == 0:
                print(f"update {update + 1}: mean episode length {mean_len:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
