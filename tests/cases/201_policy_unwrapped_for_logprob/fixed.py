"""REINFORCE with a learned baseline on a contextual bandit; reward shaping as in small RLHF repositories."""
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

cfg = SimpleNamespace(num_updates=40, rollouts=24, obs_dim=6, num_actions=5, lr=5e-3, kl_coef=0.02, seed=20)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(cfg.obs_dim, 32), nn.Tanh())
        self.logits, self.baseline = nn.Linear(32, cfg.num_actions), nn.Linear(32, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.logits(h), self.baseline(h).squeeze(1)

    @torch.no_grad()
    def act(self, obs):
        return torch.distributions.Categorical(logits=self.forward(obs)[0]).sample()


class Bandit:
    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.table = torch.randn(cfg.obs_dim, cfg.num_actions, generator=torch.Generator().manual_seed(1))

    def reset(self):
        return torch.randn(cfg.rollouts, cfg.obs_dim, generator=self.gen)

    def reward(self, obs, action):
        return (obs @ self.table).gather(1, action[:, None]).squeeze(1)


def unwrap(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def update(policy, reference, optimizer, obs, actions, rewards):
    logits, values = policy(obs)
    logp = logits.log_softmax(-1)
    with torch.no_grad():
        ref = reference(obs)[0].log_softmax(-1)
    kl = (logp.exp() * (logp - ref)).sum(1).mean()
    advantage = (rewards - values).detach()
    loss = -(logp.gather(1, actions[:, None]).squeeze(1) * advantage).mean() + 0.5 * (values - rewards).square().mean() + cfg.kl_coef * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(cfg.seed)
    reference = Policy().requires_grad_(False)
    policy = Policy()
    policy.load_state_dict(reference.state_dict())
    policy = DistributedDataParallel(policy)
    torch.manual_seed(cfg.seed + 1 + rank)  # actions are sampled independently
    optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.lr)
    env = Bandit(cfg.seed + 100 * (rank + 1))
    for it in range(cfg.num_updates):
        obs = env.reset()
        actions = unwrap(policy).act(obs)
        rewards = env.reward(obs, actions)
        update(policy, reference, optimizer, obs, actions, rewards)
        if (it + 1) % 10 == 0:
            r = rewards.mean()
            dist.all_reduce(r)
            if rank == 0:
                print(f"update {it + 1}: mean reward {r.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
