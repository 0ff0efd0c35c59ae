"""Asynchronous advantage actor-critic on a small corridor, parameters in shared memory."""
import argparse
import random

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F


class Corridor:
    """Walk right to the goal; every step costs a little, pits end the episode."""

    def __init__(self, length=12, horizon=40, seed=0):
        self.length, self.horizon = length, horizon
        self.rng = random.Random(seed)

    def reset(self):
        self.pos, self.t = 2, 0
        self.slip = self.rng.uniform(0.0, 0.2)
        return self.observe()

    def observe(self):
        obs = torch.zeros(self.length + 1)
        obs[self.pos] = 1.0
        obs[-1] = self.slip
        return obs

    def step(self, action):
        move = 1 if action == 1 else -1
        if self.rng.random() < self.slip:
            move = -move
        self.pos += move
        self.t += 1
        if self.pos <= 0:
            return self.observe(), -1.0, True
        if self.pos >= self.length - 1:
            return self.observe(), 1.0, True
        return self.observe(), -0.02, self.t >= self.horizon


class ActorCritic(nn.Module):
    def __init__(self, n_obs=13, n_act=2, width=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_obs, width), nn.Tanh())
        self.policy = nn.Linear(width, n_act)
        self.value = nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        return self.policy(h), self.value(h).squeeze(-1)


def push_gradients(local, shared):
    for p, sp in zip(local.parameters(), shared.parameters()):
        if sp.grad is not None:
            return
        sp._grad = p.grad


def rollout(env, net, obs, n_steps):
    logps, values, rewards, entropies = [], [], [], []
    done = False
    for _ in range(n_steps):
        logits, value = net(obs)
        pi = torch.distributions.Categorical(logits=logits)
        action = pi.sample()
        obs, reward, done = env.step(action.item())
        logps.append(pi.log_prob(action))
        entropies.append(pi.entropy())
        values.append(value)
        rewards.append(reward)
        if done:
            break
    return obs, done, logps, values, rewards, entropies


def a3c_loss(logps, values, rewards, entropies, bootstrap, args):
    ret, returns = bootstrap, []
    for r in reversed(rewards):
        ret = r + args.gamma * ret
        returns.append(ret)
    returns = torch.tensor(returns[::-1])
    values = torch.stack(values)
    adv = (returns - values).detach()
    policy = -(torch.stack(logps) * adv).mean()
    return policy + 0.5 * F.mse_loss(values, returns) - args.entropy * torch.stack(entropies).mean()


def worker(index, shared, counter, args):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + 1 + index)
    env = Corridor(seed=args.seed + 100 * (index + 1))
    local = ActorCritic()
    optimizer = torch.optim.SGD(shared.parameters(), lr=args.lr)
    obs, total, episode = env.reset(), 0.0, 0
    for update in range(args.updates):
        local.load_state_dict(shared.state_dict())
        obs, done, logps, values, rewards, entropies = rollout(env, local, obs, args.n_steps)
        total += sum(rewards)
        bootstrap = 0.0
        if not done:
            with torch.no_grad():
                bootstrap = local(obs)[1].item()
        loss = a3c_loss(logps, values, rewards, entropies, bootstrap, args)
        local.zero_grad()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(local.parameters(), args.clip)
        push_gradients(local, shared)
        optimizer.step()
        with counter.get_lock():
            counter.value += len(rewards)
        if done:
            episode += 1
            if index == 0 and episode % 50 == 0:
                print(f"worker 0 update {update} episode {episode} mean return {total / 50:.3f} "
                      f"env steps {counter.value}", flush=True)
            if episode % 50 == 0:
                total = 0.0
            obs = env.reset()


@torch.no_grad()
def evaluate(net, episodes, seed):
    env = Corridor(seed=seed)
    gen, score = torch.Generator().manual_seed(seed), 0.0
    for _ in range(episodes):
        obs, done = env.reset(), False
        while not done:
            probs = net(obs)[0].softmax(-1)
            obs, reward, done = env.step(torch.multinomial(probs, 1, generator=gen).item())
            score += reward
    return score / episodes


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--updates", type=int, default=600)
    ap.add_argument("--n-steps", type=int, default=8)
    ap.add_argument("--gamma", type=float, default=0.97)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--clip", type=float, default=5.0)
    ap.add_argument("--entropy", type=float, default=0.01)
    ap.add_argument("--seed", type=int, default=17)
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    ctx = mp.get_context("spawn")
    shared = ActorCritic()
    shared.share_memory()
    counter = ctx.Value("i", 0)
    print(f"before: mean return {evaluate(shared, 50, 999):.3f}", flush=True)
    procs = [ctx.Process(target=worker, args=(i, shared, counter, args)) for i in range(args.workers)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    failed = [p.exitcode for p in procs if p.exitcode != 0]
    if failed:
        raise SystemExit(f"workers failed: {failed}")
    print(f"after {counter.value} env steps: mean return {evaluate(shared, 50, 999):.3f}", flush=True)


if __name__ == "__main__":
    main()
