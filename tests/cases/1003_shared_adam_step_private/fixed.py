"""Asynchronous actor-critic on a corridor task with a shared Adam."""
import argparse
import math

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F


class SharedAdam(torch.optim.Optimizer):
    """Adam whose statistics live in shared memory, so that all workers update the same ones."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = torch.zeros(1)
                state["exp_avg"] = torch.zeros_like(p.data)
                state["exp_avg_sq"] = torch.zeros_like(p.data)

    def share_memory(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"].share_memory_()
                state["exp_avg"].share_memory_()
                state["exp_avg_sq"].share_memory_()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                c1 = 1 - beta1 ** state["step"].item()
                c2 = 1 - beta2 ** state["step"].item()
                denom = state["exp_avg_sq"].sqrt().add_(group["eps"])
                p.addcdiv_(state["exp_avg"], denom, value=-group["lr"] * math.sqrt(c2) / c1)


class ActorCritic(nn.Module):
    def __init__(self, states=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(states, 32), nn.Tanh())
        self.pi = nn.Linear(32, 2)
        self.v = nn.Linear(32, 1)

    def forward(self, s):
        h = self.body(s)
        return self.pi(h), self.v(h).squeeze(-1)


def rollout(model, gen, length=12, states=8):
    pos, obs, acts, rewards = 2, [], [], []
    for _ in range(length):
        s = F.one_hot(torch.tensor(pos), states).float()
        with torch.no_grad():
            probs = model(s)[0].softmax(-1)
        a = torch.multinomial(probs, 1, generator=gen).item()
        pos = max(0, min(states - 1, pos + (1 if a == 1 else -1)))
        obs.append(s)
        acts.append(a)
        rewards.append(1.0 if pos == states - 1 else -0.05)
    return torch.stack(obs), torch.tensor(acts), rewards


def worker(wid, args, shared, optimizer):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + wid)
    gen = torch.Generator().manual_seed(args.seed + 100 * wid)
    local = ActorCritic()
    for it in range(args.updates):
        local.load_state_dict(shared.state_dict())
        obs, acts, rewards = rollout(local, gen)
        ret, returns = 0.0, []
        for r in reversed(rewards):
            ret = r + args.gamma * ret
            returns.insert(0, ret)
        returns = torch.tensor(returns)
        logits, value = local(obs)
        logp = logits.log_softmax(-1).gather(1, acts[:, None]).squeeze(1)
        loss = -(logp * (returns - value.detach())).mean() + 0.5 * F.mse_loss(value, returns)
        local.zero_grad()
        loss.backward()
        for lp, sp in zip(local.parameters(), shared.parameters()):
            sp.grad = lp.grad.clone()
        optimizer.step()
        if it % 50 == 0:
            print(f"worker {wid} update {it} return {sum(rewards):.2f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--updates", type=int, default=150)
    ap.add_argument("--gamma", type=float, default=0.95)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=5)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    mp.set_start_method("fork")
    shared = ActorCritic()
    shared.share_memory()
    optimizer = SharedAdam(shared.parameters(), lr=args.lr)
    optimizer.share_memory()
    procs = [mp.Process(target=worker, args=(i, args, shared, optimizer)) for i in range(args.workers)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    gen = torch.Generator().manual_seed(999)
    score = sum(sum(rollout(shared, gen)[2]) for _ in range(10)) / 10
    print(f"final mean return {score:.2f}")


if __name__ == "__main__":
    main()
