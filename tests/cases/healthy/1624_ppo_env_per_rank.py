"""PPO on a vectorised cart-pole written in torch; each rank steps its own environments.

Gradients are averaged through one flat all-reduce, advantages are normalised with global statistics,
and the KL early stop is decided on an all-reduced number so that no rank leaves the loop alone.
"""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical

N_ENV, HORIZON, UPDATES, EPOCHS, MINI = 16, 48, 24, 4, 4
GAMMA, LAM, CLIP = 0.99, 0.95, 0.2


class CartPoles:
    def __init__(self, n, seed):
        self.n, self.g = n, torch.Generator().manual_seed(seed)
        self.s = self._fresh(n)
        self.t = torch.zeros(n)

    def _fresh(self, n):
        return torch.rand(n, 4, generator=self.g) * 0.1 - 0.05

    def step(self, a):
        x, v, th, om = self.s.unbind(1)
        f = 20.0 * a.float() - 10.0
        tmp = (f + 0.05 * om ** 2 * th.sin()) / 1.1
        acc = (9.8 * th.sin() - th.cos() * tmp) / (0.5 * (4 / 3 - 0.1 * th.cos() ** 2 / 1.1))
        xa = tmp - 0.05 * acc * th.cos() / 1.1
        self.s = torch.stack([x + 0.02 * v, v + 0.02 * xa, th + 0.02 * om, om + 0.02 * acc], 1)
        self.t += 1
        fell = (self.s[:, 0].abs() > 2.4) | (self.s[:, 2].abs() > 12 * math.pi / 180)
        late = (self.t >= 200) & ~fell
        terminal_obs = self.s.clone()
        over = fell | late
        lengths = self.t[over].clone()
        if over.any():
            self.s[over] = self._fresh(int(over.sum()))
            self.t[over] = 0
        return self.s.clone(), torch.ones(self.n), fell, late, terminal_obs, lengths


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
        self.v = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def average_gradients(params, world):
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in params:
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    agent = Agent()
    torch.manual_seed(2000 + rank)  # actions and minibatch order differ
    params = list(agent.parameters())
    opt = torch.optim.Adam(params, lr=1.5e-3, eps=1e-5)
    env = CartPoles(N_ENV, seed=300 + rank)
    obs = env.s.clone()
    first = last = None
    for update in range(UPDATES):
        for g in opt.param_groups:
            g["lr"] = 1.5e-3 * (1 - update / UPDATES)
        buf = {k: [] for k in ("obs", "act", "logp", "val", "rew", "cont")}
        ended = []
        with torch.no_grad():
            for _ in range(HORIZON):
                dist_a = Categorical(logits=agent.pi(obs))
                act = dist_a.sample()
                buf["obs"].append(obs)
                buf["act"].append(act)
                buf["logp"].append(dist_a.log_prob(act))
                buf["val"].append(agent.v(obs).squeeze(1))
                obs, rew, fell, late, term, lengths = env.step(act)
                rew = rew + GAMMA * late.float() * agent.v(term).squeeze(1)  # time limit is no failure
                buf["rew"].append(rew)
                buf["cont"].append((~(fell | late)).float())
                ended += lengths.tolist()
            nxt, run, adv = agent.v(obs).squeeze(1), torch.zeros(N_ENV), [None] * HORIZON
            for t in reversed(range(HORIZON)):
                delta = buf["rew"][t] + GAMMA * nxt * buf["cont"][t] - buf["val"][t]
                run = delta + GAMMA * LAM * buf["cont"][t] * run
                adv[t], nxt = run, buf["val"][t]
        o, a, lp, v = (torch.stack(buf[k]).flatten(0, 1) for k in ("obs", "act", "logp", "val"))
        adv = torch.stack(adv).flatten()
        ret = adv + v
        mom = torch.stack([adv.sum(), adv.pow(2).sum(), torch.tensor(float(adv.numel()))])
        dist.all_reduce(mom)
        mean = mom[0] / mom[2]
        adv = (adv - mean) / ((mom[1] / mom[2] - mean ** 2).clamp_min(0).sqrt() + 1e-8)

        for _ in range(EPOCHS):
            kls = torch.zeros(1)
            for idx in torch.randperm(len(o)).chunk(MINI):
                pol = Categorical(logits=agent.pi(o[idx]))
                new = pol.log_prob(a[idx])
                ratio = (new - lp[idx]).exp()
                surr = torch.min(ratio * adv[idx], ratio.clamp(1 - CLIP, 1 + CLIP) * adv[idx]).mean()
                v_loss = (agent.v(o[idx]).squeeze(1) - ret[idx]).pow(2).mean()
                loss = -surr + 0.5 * v_loss - 0.005 * pol.entropy().mean()
                opt.zero_grad()
                loss.backward()
                average_gradients(params, world)
                nn.utils.clip_grad_norm_(params, 0.5)
                opt.step()
                kls += (ratio - 1 - (new - lp[idx])).mean().detach() / MINI
            dist.all_reduce(kls)
            if kls.item() / world > 0.03:
                break

        stat = torch.tensor([sum(ended), float(len(ended))])
        dist.all_reduce(stat)
        if stat[1] > 0:
            last = (stat[0] / stat[1]).item()
            first = last if first is None else first
        if rank == 0 and update % 6 == 5:
            print(f"update {update} mean episode length {last:.1f}", flush=True)
    assert last > 1.5 * first, (first, last)
    if rank == 0:
        torch.save(agent.state_dict(), "ppo_agent.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
