"""Single-file PPO: no wrapper, the flattened gradient is averaged by hand; one batch of environments per process."""
import os
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical


@dataclass
class Args:
    seed: int = 1
    num_envs: int = 8
    num_steps: int = 32
    iterations: int = 16
    epochs: int = 3
    minibatches: int = 4
    lr: float = 3e-3
    gamma: float = 0.97
    lam: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    max_norm: float = 0.5


class Track:
    """A point on a line that should be kept near a slowly moving mark."""

    def __init__(self, n, rng):
        self.n, self.rng = n, rng
        self.reset()

    def reset(self):
        self.x = self.rng.uniform(-1, 1, self.n)
        self.mark = self.rng.uniform(-1, 1, self.n)
        self.age = np.zeros(self.n, dtype=int)
        return self.view()

    def view(self):
        return np.stack([self.x, self.mark, self.x - self.mark], 1).astype(np.float32)

    def step(self, action):
        self.x = self.x + 0.15 * (action - 1)
        self.mark = np.clip(self.mark + self.rng.normal(0, 0.03, self.n), -1, 1)
        reward = 1 - np.abs(self.x - self.mark)
        self.age += 1
        done = (self.age >= 40) | (np.abs(self.x) > 2)
        if done.any():
            k = int(done.sum())
            self.x[done] = self.rng.uniform(-1, 1, k)
            self.mark[done] = self.rng.uniform(-1, 1, k)
            self.age[done] = 0
        return self.view(), reward.astype(np.float32), done.astype(np.float32)


def layer_init(layer, std=2 ** 0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(3, 64)), nn.Tanh(), layer_init(nn.Linear(64, 1), 1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(3, 64)), nn.Tanh(), layer_init(nn.Linear(64, 3), 0.01))

    def get_action_and_value(self, obs, action=None):
        probs = Categorical(logits=self.actor(obs))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(obs).squeeze(-1)


def average_gradients(agent, world):
    grads = [p.grad.view(-1) for p in agent.parameters() if p.grad is not None]
    flat = torch.cat(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    offset = 0
    for p in agent.parameters():
        if p.grad is not None:
            p.grad.copy_(flat[offset:offset + p.numel()].view_as(p.grad) / world)
            offset += p.numel()


if __name__ == "__main__":
    args = Args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    local_rank, world = dist.get_rank(), dist.get_world_size()
    args.seed += local_rank
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed - local_rank)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    torch.manual_seed(args.seed)

    env = Track(args.num_envs, np.random.default_rng(args.seed))
    obs = torch.from_numpy(env.reset())
    done = torch.zeros(args.num_envs)
    T, N = args.num_steps, args.num_envs
    for iteration in range(1, args.iterations + 1):
        optimizer.param_groups[0]["lr"] = (1 - (iteration - 1) / args.iterations) * args.lr
        buf = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
        for _ in range(T):
            with torch.no_grad():
                action, logp, _, value = agent.get_action_and_value(obs)
            for key, item in zip(("obs", "act", "logp", "val", "done"), (obs, action, logp, value, done)):
                buf[key].append(item)
            nxt, reward, ended = env.step(action.numpy())
            buf["rew"].append(torch.from_numpy(reward))
            obs, done = torch.from_numpy(nxt), torch.from_numpy(ended)
        buf = {k: torch.stack(v) for k, v in buf.items()}
        with torch.no_grad():
            next_value = agent.critic(obs).squeeze(-1)
        adv = torch.zeros(T, N)
        last = torch.zeros(N)
        for t in reversed(range(T)):
            alive = 1 - (done if t == T - 1 else buf["done"][t + 1])
            following = next_value if t == T - 1 else buf["val"][t + 1]
            delta = buf["rew"][t] + args.gamma * following * alive - buf["val"][t]
            last = delta + args.gamma * args.lam * alive * last
            adv[t] = last
        returns = adv + buf["val"]
        b = {k: v.flatten(0, 1) for k, v in buf.items()}
        b_adv, b_ret = adv.flatten(), returns.flatten()

        for _ in range(args.epochs):
            for mb in torch.randperm(T * N).chunk(args.minibatches):
                _, logp, entropy, value = agent.get_action_and_value(b["obs"][mb], b["act"][mb])
                ratio = (logp - b["logp"][mb]).exp()
                a = (b_adv[mb] - b_adv[mb].mean()) / (b_adv[mb].std() + 1e-8)
                pg = torch.max(-a * ratio, -a * ratio.clamp(1 - args.clip, 1 + args.clip)).mean()
                v_loss = 0.5 * (value - b_ret[mb]).pow(2).mean()
                loss = pg - args.entropy * entropy.mean() + args.value * v_loss
                optimizer.zero_grad()
                loss.backward()
                average_gradients(agent, world)
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_norm)
                optimizer.step()
        if iteration % 4 == 0:
            mean_reward = buf["rew"].mean().reshape(1)
            dist.all_reduce(mean_reward)
            if local_rank == 0:
                print(f"iteration {iteration} reward {mean_reward.item() / world:.3f}", flush=True)
    if local_rank == 0:
        os.makedirs("runs/ppo", exist_ok=True)
        torch.save(agent.state_dict(), "runs/ppo/agent.pt")
    dist.destroy_process_group()
