"""Asynchronous workers that play a small bandit and share one policy."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F


class Policy(nn.Module):
    def __init__(self, arms=5, ctx=8):
        super().__init__()
        self.hidden = nn.Linear(ctx, 32)
        self.actor = nn.Linear(32, arms)
        self.critic = nn.Linear(32, 1)

    def forward(self, ctx):
        h = torch.tanh(self.hidden(ctx))
        return self.actor(h), self.critic(h).squeeze(1)


class Bandit:
    def __init__(self, seed):
        g = torch.Generator().manual_seed(99)
        self.table = torch.randn(8, 5, generator=g)
        self.gen = torch.Generator().manual_seed(seed)

    def contexts(self, n):
        return torch.randn(n, 8, generator=self.gen)

    def pull(self, ctx, arm):
        return (ctx @ self.table).gather(1, arm[:, None]).squeeze(1)


def hand_over(local, shared):
    for mine, theirs in zip(local.parameters(), shared.parameters()):
        theirs.grad = mine.grad


def play(worker, shared, args):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + worker)
    env = Bandit(args.seed + worker)
    local = Policy()
    optimizer = torch.optim.SGD(shared.parameters(), lr=args.lr)
    for step in range(args.steps):
        local.load_state_dict(shared.state_dict())
        ctx = env.contexts(32)
        logits, value = local(ctx)
        policy = torch.distributions.Categorical(logits=logits)
        arm = policy.sample()
        reward = env.pull(ctx, arm)
        advantage = reward - value
        loss = -(policy.log_prob(arm) * advantage.detach()).mean()
        loss = loss + 0.5 * advantage.pow(2).mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        hand_over(local, shared)
        optimizer.step()
        if step % 50 == 0:
            print(f"worker {worker} step {step}: reward {reward.mean().item():.3f}", flush=True)


def score(policy):
    env = Bandit(12345)
    ctx = env.contexts(2000)
    with torch.no_grad():
        arm = policy(ctx)[0].argmax(1)
    return env.pull(ctx, arm).mean().item()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    shared = Policy()
    shared.share_memory()
    print(f"before: {score(shared):.3f}")
    procs = [mp.Process(target=play, args=(w, shared, args)) for w in range(args.workers)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    print(f"after: {score(shared):.3f}")
