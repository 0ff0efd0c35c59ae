"""PPO on a vectorised cart-pole written in torch; every process steps its own environments."""
import argparse
import math
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


class CartPole:
    """`n` independent cart-poles; fallen ones restart at once. Reward 1 a step, no time limit."""

    def __init__(self, n, seed):
        self.n, self.g = n, torch.Generator().manual_seed(seed)
        self.state, self.t = self._fresh(n), torch.zeros(n)

    def _fresh(self, n):
        return torch.rand(n, 4, generator=self.g) * 0.1 - 0.05

    def step(self, action):
        x, v, th, w = self.state.unbind(1)
        force = torch.where(action == 1, 10.0, -10.0)
        tmp = (force + 0.05 * w ** 2 * th.sin()) / 1.1
        th_acc = (9.8 * th.sin() - th.cos() * tmp) / (0.5 * (4 / 3 - 0.1 * th.cos() ** 2 / 1.1))
        x_acc = tmp - 0.05 * th_acc * th.cos() / 1.1
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * x_acc, th + 0.02 * w, w + 0.02 * th_acc], dim=1)
        self.t += 1
        done = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 12 * math.pi / 180)
        lengths = self.t[done]
        if done.any():
            self.state[done] = self._fresh(int(done.sum()))
            self.t[done] = 0
        return self.state, torch.ones(self.n), done.float(), lengths


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, 2), nn.Linear(64, 1)
        nn.init.orthogonal_(self.pi.weight, 0.01)
        nn.init.zeros_(self.pi.bias)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


def global_mean_std(x):
    s = torch.stack([x.sum(), (x * x).sum(), torch.tensor(float(x.numel()))]).double()
    dist.all_reduce(s)
    mean = s[0] / s[2]
    return mean.float(), (s[1] / s[2] - mean ** 2).clamp_min(1e-8).sqrt().float()


@torch.no_grad()
def collect(policy, env, obs, horizon, gamma, lam):
    store = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
    lengths = []
    for _ in range(horizon):
        logits, value = policy(obs)
        pi = Categorical(logits=logits)
        action = pi.sample()
        nxt, reward, done, finished = env.step(action)
        for k, t in zip(store, (obs, action, pi.log_prob(action), value, reward, done)):
            store[k].append(t)
        lengths.append(finished)
        obs = nxt.clone()
    data = {k: torch.stack(v) for k, v in store.items()}
    next_value = policy(obs)[1]
    adv, last = torch.zeros_like(data["rew"]), torch.zeros(env.n)
    for t in reversed(range(horizon)):
        live = 1 - data["done"][t]
        last = data["rew"][t] + gamma * next_value * live - data["val"][t] + gamma * lam * live * last
        adv[t], next_value = last, data["val"][t]
    data["adv"], data["ret"] = adv, adv + data["val"]
    batch = {k: data[k].flatten(0, 1) for k in ("obs", "act", "logp", "adv", "ret")}
    return batch, obs, torch.cat(lengths)


def update(model, optimizer, batch, args):
    """Several epochs of minibatches; left early, by all processes together, when the policy has moved too far."""
    mean, std = global_mean_std(batch["adv"])
    batch["adv"] = (batch["adv"] - mean) / std
    n, steps = len(batch["adv"]), 0
    for _ in range(args.ppo_epochs):
        kl_sum = torch.zeros(())
        for idx in torch.randperm(n).split(args.minibatch):
            logits, value = model(batch["obs"][idx])
            pi = Categorical(logits=logits)
            log_ratio = pi.log_prob(batch["act"][idx]) - batch["logp"][idx]
            ratio, adv = log_ratio.exp(), batch["adv"][idx]
            policy_loss = -torch.min(ratio * adv, ratio.clamp(1 - args.clip, 1 + args.clip) * adv).mean()
            value_loss = (value - batch["ret"][idx]).pow(2).mean()
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * pi.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            kl_sum += ((ratio - 1) - log_ratio).mean().detach()
            steps += 1
        dist.all_reduce(kl_sum)
        kl = kl_sum.item() / (dist.get_world_size() * (n // args.minibatch))
        if kl > args.target_kl:  # the same number on every process
            break
    return kl, steps


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--iterations", type=int, default=12)
    p.add_argument("--envs", type=int, default=16, help="environments per process")
    p.add_argument("--horizon", type=int, default=64)
    p.add_argument("--minibatch", type=int, default=256)
    p.add_argument("--ppo-epochs", type=int, default=6)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--gamma", type=float, default=0.99)
    p.add_argument("--lam", type=float, default=0.95)
    p.add_argument("--clip", type=float, default=0.2)
    p.add_argument("--target-kl", type=float, default=0.03)
    p.add_argument("--vf-coef", type=float, default=0.01)
    p.add_argument("--ent-coef", type=float, default=0.005)
    args = p.parse_args()
    assert (args.envs * args.horizon) % args.minibatch == 0

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)
    torch.manual_seed(100 + rank)  # actions and minibatch order
    env = CartPole(args.envs, seed=9000 + rank)
    obs = env.state.clone()

    total_steps, start = 0, time.time()
    for it in range(args.iterations):
        optimizer.param_groups[0]["lr"] = args.lr * (1 - it / args.iterations)
        # No gradients while acting, so the plain module is enough.
        batch, obs, lengths = collect(model.module, env, obs, args.horizon, args.gamma, args.lam)
        kl, steps = update(model, optimizer, batch, args)
        total_steps += steps
        stats = torch.tensor([lengths.sum().item(), float(len(lengths))])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"iter {it:2d} episodes {int(stats[1]):3d} mean length {stats[0] / stats[1].clamp_min(1):6.1f} "
                  f"kl {kl:.4f} updates {total_steps} {time.time() - start:.1f}s", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "ppo_cartpole.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
