import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Normal


class Reacher:
    def __init__(self, n, seed, horizon=20):
        self.rng, self.n, self.horizon = np.random.default_rng(seed), n, horizon

    def reset(self):
        self.p = self.rng.uniform(-1, 1, (self.n, 2))
        self.goal = self.rng.uniform(-1, 1, (self.n, 2))
        return self.obs()

    def obs(self):
        return torch.tensor(np.concatenate([self.p, self.goal], 1), dtype=torch.float32)

    def step(self, a):
        self.p = np.clip(self.p + 0.2 * np.clip(a.numpy(), -1, 1), -1.5, 1.5)
        return self.obs(), torch.tensor(-np.linalg.norm(self.p - self.goal, axis=1), dtype=torch.float32)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
        self.v = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def dist(self, o):
        return Normal(self.pi(o), self.log_std.exp())

    def value(self, o):
        return self.v(o).squeeze(-1)


def ring_mean(params):
    """Mean of the gradients by passing the flat vector once around the ring."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.cat([p.grad.reshape(-1) for p in params])
    total, travelling = own.clone(), own.clone()
    for _ in range(world - 1):
        incoming = torch.empty_like(travelling)
        ops = [dist.P2POp(dist.isend, travelling, (rank + 1) % world), dist.P2POp(dist.irecv, incoming, (rank - 1) % world)]
        for w in dist.batch_isend_irecv(ops):
            w.wait()
        total += incoming
        travelling = incoming
    total /= world
    for p, g in zip(params, total.split([p.numel() for p in params])):
        p.grad.copy_(g.view_as(p))


def global_moments(x):
    s = torch.stack([x.sum(), x.pow(2).sum(), torch.tensor(float(x.numel()))])
    dist.all_reduce(s)
    mean = s[0] / s[2]
    return mean, (s[1] / s[2] - mean ** 2).clamp_min(1e-8).sqrt()


def collect(env, agent, gamma=0.95, lam=0.9):
    obs, act, logp, rew, val = [], [], [], [], []
    o = env.reset()
    with torch.no_grad():
        for _ in range(env.horizon):
            d = agent.dist(o)
            a = d.sample()
            obs.append(o), act.append(a), logp.append(d.log_prob(a).sum(-1)), val.append(agent.value(o))
            o, r = env.step(a)
            rew.append(r)
        nxt, gae, adv = agent.value(o), torch.zeros(env.n), []
        for r, v in zip(reversed(rew), reversed(val)):
            gae = r + gamma * nxt - v + gamma * lam * gae
            adv.append(gae)
            nxt = v
    adv = torch.stack(adv[::-1])
    val = torch.stack(val)
    flat = [torch.stack(t).flatten(0, 1) for t in (obs, act, logp)]
    return (*flat, adv.flatten(), (adv + val).flatten(), torch.stack(rew).sum(0).mean())


def main(iters=30, epochs=4, parts=4):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    agent = Agent()
    params = list(agent.parameters())
    for p in params:
        dist.broadcast(p.data, 0)
    torch.manual_seed(90 + rank)
    env = Reacher(32, 30 + rank)
    opt = torch.optim.Adam(params, lr=2e-3, eps=1e-5)
    for it in range(1, iters + 1):
        obs, act, old, adv, ret, score = collect(env, agent)
        mean, std = global_moments(adv)
        adv = (adv - mean) / std
        for _ in range(epochs):
            for idx in torch.randperm(len(obs)).chunk(parts):
                d = agent.dist(obs[idx])
                logp = d.log_prob(act[idx]).sum(-1)
                ratio = (logp - old[idx]).exp()
                surr = torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx]).mean()
                loss = -surr + 0.5 * (agent.value(obs[idx]) - ret[idx]).pow(2).mean() - 0.001 * d.entropy().mean()
                opt.zero_grad()
                loss.backward()
                ring_mean(params)
                nn.utils.clip_grad_norm_(params, 0.5)
                opt.step()
            with torch.no_grad():
                kl = (old - agent.dist(obs).log_prob(act).sum(-1)).mean()
            dist.all_reduce(kl)
            if kl / world > 0.05:
                break
        dist.all_reduce(score)
        if rank == 0 and it % 10 == 0:
            print(f"iter {it} return {score.item() / world:.3f} kl {kl.item() / world:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
