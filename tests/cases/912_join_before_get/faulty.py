"""Evolution-like policy search: rollout workers return trajectories, the parent does the update."""
import argparse

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import nn


class Policy(nn.Module):
    def __init__(self, obs=16, act=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, 64), nn.Tanh(), nn.Linear(64, act))

    def forward(self, obs):
        return self.net(obs)


class Chain:
    """Hidden goal direction, reward for the action that matches it."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.maps = np.random.default_rng(0).normal(size=(4, 16))

    def reset(self):
        self.obs = self.rng.normal(size=16)
        return self.obs

    def step(self, action):
        reward = float(np.argmax(self.maps @ self.obs) == action)
        self.obs = 0.5 * self.obs + self.rng.normal(size=16)
        return self.obs, reward


def rollout(wid, policy, horizon, seed, out):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    env = Chain(seed)
    obs = env.reset()
    seen = np.zeros((horizon, 16), dtype=np.float32)
    actions = np.zeros(horizon, dtype=np.int64)
    rewards = np.zeros(horizon, dtype=np.float32)
    with torch.no_grad():
        for t in range(horizon):
            seen[t] = obs
            logits = policy(torch.from_numpy(seen[t]))
            actions[t] = torch.distributions.Categorical(logits=logits).sample().item()
            obs, rewards[t] = env.step(actions[t])
    out.put({"worker": wid, "obs": seen, "actions": actions, "rewards": rewards})


def update(policy, optimizer, batches):
    obs = torch.from_numpy(np.concatenate([b["obs"] for b in batches]))
    actions = torch.from_numpy(np.concatenate([b["actions"] for b in batches]))
    rewards = torch.from_numpy(np.concatenate([b["rewards"] for b in batches]))
    logp = torch.log_softmax(policy(obs), dim=1).gather(1, actions[:, None]).squeeze(1)
    loss = -((rewards - rewards.mean()) * logp).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return rewards.mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--iterations", type=int, default=4)
    ap.add_argument("--horizon", type=int, default=1500)
    ap.add_argument("--lr", type=float, default=2e-2)
    args = ap.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ctx = mp.get_context("fork")
    policy = Policy()
    policy.share_memory()
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    for it in range(args.iterations):
        out = ctx.Queue()
        workers = []
        for w in range(args.workers):
            p = ctx.Process(target=rollout, args=(w, policy, args.horizon, 100 * it + w, out))
            p.start()
            workers.append(p)
        for p in workers:
            p.join()
        batches = [out.get() for _ in workers]
        print(f"iteration {it}: mean reward {update(policy, optimizer, batches):.3f}", flush=True)


if __name__ == "__main__":
    main()
