"""PPO on a vectorised go-to-goal task with a curriculum; observations are standardised by running moments."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn


class GoToGoal:
    """Position and goal are given in world coordinates; the arena moves away as the level rises."""

    def __init__(self, n, seed):
        self.n, self.gen, self.level = n, torch.Generator().manual_seed(seed), 0.0

    def reset(self):
        centre = 8.0 * self.level
        self.pos = centre + torch.randn(self.n, 2, generator=self.gen)
        self.goal = centre + 1.5 * torch.randn(self.n, 2, generator=self.gen)
        return self.obs()

    def obs(self):
        return torch.cat([self.pos, self.goal], 1)

    def step(self, action):
        before = (self.goal - self.pos).norm(dim=1)
        self.pos = self.pos + 0.25 * action.clamp(-1, 1)
        after = (self.goal - self.pos).norm(dim=1)
        return self.obs(), 4.0 * (before - after)


class RunningMoments:
    def __init__(self, dim):
        self.dim = dim
        self.total = torch.zeros(1 + 2 * dim, dtype=torch.float64)
        self.fresh = torch.zeros(1 + 2 * dim, dtype=torch.float64)

    def observe(self, x):
        x = x.double()
        self.fresh += torch.cat([torch.tensor([float(len(x))], dtype=torch.float64), x.sum(0), (x * x).sum(0)])

    def sync(self):
        dist.all_reduce(self.fresh)
        self.total += self.fresh
        self.fresh.zero_()

    def __call__(self, x):
        if self.total[0] == 0:
            return x
        mean = self.total[1:1 + self.dim] / self.total[0]
        var = self.total[1 + self.dim:] / self.total[0] - mean ** 2
        return ((x - mean.float()) / (var.clamp_min(1e-4).sqrt().float())).clamp(-4, 4)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.mu, self.value = nn.Linear(48, 2), nn.Linear(48, 1)
        self.log_std = nn.Parameter(torch.full((2,), -0.7))

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Normal(self.mu(h), self.log_std.exp().expand(len(x), 2)), self.value(h).squeeze(1)


def rollout(env, net, norm, horizon, gen, gamma=0.9, lam=0.9):
    obs, act, logp, val, rew = [], [], [], [], []
    raw = env.reset()
    with torch.no_grad():
        for _ in range(horizon):
            norm.observe(raw)
            x = norm(raw)
            pi, v = net(x)
            a = pi.mean + pi.stddev * torch.randn(pi.mean.shape, generator=gen)
            raw, r = env.step(a)
            obs.append(x), act.append(a), logp.append(pi.log_prob(a).sum(1)), val.append(v), rew.append(r)
        last = net(norm(raw))[1]
    adv, run = [], torch.zeros(env.n)
    for t in reversed(range(horizon)):
        nxt = val[t + 1] if t + 1 < horizon else last
        run = rew[t] + gamma * nxt - val[t] + gamma * lam * run
        adv.append(run)
    adv = torch.cat(adv[::-1])
    val = torch.cat(val)
    return torch.cat(obs), torch.cat(act), torch.cat(logp), adv, adv + val, torch.stack(rew).mean()


def standardise(adv):
    s = torch.stack([torch.tensor(float(len(adv))), adv.sum(), (adv ** 2).sum()])
    dist.all_reduce(s)
    mean = s[1] / s[0]
    return (adv - mean) / ((s[2] / s[0] - mean ** 2).clamp_min(0).sqrt() + 1e-6)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=40)
    ap.add_argument("--envs", type=int, default=32)
    ap.add_argument("--horizon", type=int, default=20)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    net = ActorCritic()
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    env, norm = GoToGoal(args.envs, 70 + rank), RunningMoments(4)
    gen = torch.Generator().manual_seed(170 + rank)
    for it in range(args.iters):
        env.level = min(1.0, it / (0.7 * args.iters))
        obs, act, old, adv, ret, mean_rew = rollout(env, net, norm, args.horizon, gen)
        norm.sync()
        adv = standardise(adv)
        for _ in range(4):
            for idx in torch.randperm(len(adv), generator=gen).chunk(4):
                pi, v = net(obs[idx])
                ratio = (pi.log_prob(act[idx]).sum(1) - old[idx]).exp()
                surr = torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx])
                loss = -surr.mean() + 0.5 * (v - ret[idx]).pow(2).mean() - 1e-3 * pi.entropy().sum(1).mean()
                opt.zero_grad()
                loss.backward()
                for p in net.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                opt.step()
        if it % 10 == 9:
            dist.all_reduce(mean_rew)
            if rank == 0:
                print(f"iter {it + 1} reward {mean_rew.item() / world:.3f} "
                      f"obs mean {(norm.total[1] / norm.total[0]).item():.2f} samples {norm.total[0].item():.3g}", flush=True)
    if rank == 0:
        os.makedirs("policy", exist_ok=True)
        torch.save({"net": net.state_dict(), "moments": norm.total}, "policy/last.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
