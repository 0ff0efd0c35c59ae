"""REINFORCE on a corridor with several environments per process."""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class VecCorridor:
    """walk to the door; the door's position and the wind are random"""

    def __init__(self, num_envs, seed, length=9):
        self.n, self.length = num_envs, length
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.pos = self.rng.integers(0, self.length, self.n)
        self.door = self.rng.integers(0, self.length, self.n)
        return self.obs()

    def obs(self):
        both = np.stack([self.pos, self.door], 1) / self.length - 0.5
        return torch.from_numpy(both.astype(np.float32))

    def step(self, action):
        wind = self.rng.random(self.n) < 0.1
        move = np.where(action == 0, -1, 1) * np.where(wind, -1, 1)
        before = np.abs(self.pos - self.door)
        self.pos = np.clip(self.pos + move, 0, self.length - 1)
        return self.obs(), torch.from_numpy((before - np.abs(self.pos - self.door)).astype(np.float32))


def rollout(policy, env, horizon):
    obs, all_obs, all_act, all_rew = env.reset(), [], [], []
    for _ in range(horizon):
        with torch.no_grad():
            act = torch.distributions.Categorical(logits=policy(obs)).sample()
        nxt, rew = env.step(act.numpy())
        all_obs.append(obs), all_act.append(act), all_rew.append(rew)
        obs = nxt
    reward = torch.stack(all_rew)
    to_go = reward.flip(0).cumsum(0).flip(0)
    return torch.cat(all_obs), torch.cat(all_act), to_go.flatten(), reward.sum(0).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=17)
    ap.add_argument("--envs", type=int, default=16)
    ap.add_argument("--updates", type=int, default=40)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed)
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    model = DDP(policy)
    env = VecCorridor(args.envs, seed=args.seed + 1000 * rank)
    torch.manual_seed(args.seed + 1000 * rank)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for update in range(args.updates):
        obs, act, ret, score = rollout(policy, env, horizon=8)
        logp = torch.distributions.Categorical(logits=model(obs)).log_prob(act)
        loss = -(logp * (ret - ret.mean())).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if update % 10 == 9:
            dist.all_reduce(score)
            if rank == 0:
                print(f"update {update + 1}: mean return {score.item() / world:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
