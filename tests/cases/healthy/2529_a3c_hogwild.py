"""Asynchronous advantage actor-critic on a grid; lock-free updates of one shared network."""
import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F


class Grid:
    def __init__(self, seed, n=5, limit=20):
        self.rng = np.random.default_rng(seed)
        self.n, self.limit = n, limit

    def reset(self):
        self.pos, self.goal = self.rng.integers(0, self.n, 2), self.rng.integers(0, self.n, 2)
        while (self.pos == self.goal).all():
            self.goal = self.rng.integers(0, self.n, 2)
        self.t = 0
        return self.obs()

    def obs(self):
        d = (self.goal - self.pos) / self.n
        return torch.tensor([*d, *(self.pos / self.n)], dtype=torch.float32)

    def step(self, a):
        self.pos = np.clip(self.pos + np.array([(0, 1), (0, -1), (1, 0), (-1, 0)][a]), 0, self.n - 1)
        self.t += 1
        win = bool((self.pos == self.goal).all())
        return self.obs(), (1.0 if win else -0.02), win or self.t >= self.limit, win


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return self.actor(h), self.critic(h).squeeze(-1)


class SharedAdam(torch.optim.Adam):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for g in self.param_groups:
            for p in g["params"]:
                s = self.state[p]
                s["step"] = torch.zeros(()).share_memory_()
                s["exp_avg"] = torch.zeros_like(p).share_memory_()
                s["exp_avg_sq"] = torch.zeros_like(p).share_memory_()


def ensure_shared_grads(local, shared):
    for pl, ps in zip(local.parameters(), shared.parameters()):
        ps.grad = pl.grad


def actor_learner(rank, shared, opt, counter, updates, nsteps=20, gamma=0.97, lam=0.95):
    torch.set_num_threads(1)
    torch.manual_seed(1 + rank)
    env = Grid(1000 + rank)
    local = ActorCritic()
    obs = env.reset()
    for _ in range(updates):
        local.load_state_dict(shared.state_dict())
        vals, logps, rews, ents, masks = [], [], [], [], []
        for _ in range(nsteps):
            logits, v = local(obs)
            lp = F.log_softmax(logits, -1)
            a = torch.multinomial(lp.exp().detach(), 1).item()
            obs, r, done, _ = env.step(a)
            vals.append(v), logps.append(lp[a]), rews.append(r), ents.append(-(lp * lp.exp()).sum())
            masks.append(0.0 if done else 1.0)
            if done:
                obs = env.reset()
        with counter.get_lock():
            counter.value += nsteps
        with torch.no_grad():
            _, nxt = local(obs)
        R, gae, ploss, vloss = nxt, 0.0, 0.0, 0.0
        vals.append(nxt)
        for i in reversed(range(nsteps)):
            R = rews[i] + gamma * masks[i] * R
            vloss = vloss + 0.5 * (R - vals[i]).pow(2)
            delta = rews[i] + gamma * masks[i] * vals[i + 1].detach() - vals[i].detach()
            gae = delta + gamma * lam * masks[i] * gae
            ploss = ploss - logps[i] * gae - 0.01 * ents[i]
        opt.zero_grad()
        local.zero_grad()
        (ploss + 0.5 * vloss).backward()
        nn.utils.clip_grad_norm_(local.parameters(), 20)
        ensure_shared_grads(local, shared)
        opt.step()


@torch.no_grad()
def evaluate(model, episodes=100):
    env, wins, steps = Grid(7), 0, 0
    for _ in range(episodes):
        o, done = env.reset(), False
        while not done:
            o, _, done, win = env.step(model(o)[0].argmax().item())
            steps += 1
        wins += win
    return wins / episodes, steps / episodes


def main():
    torch.manual_seed(0)
    ctx = mp.get_context("spawn")
    shared = ActorCritic()
    shared.share_memory()
    opt = SharedAdam(shared.parameters(), lr=2e-3)
    counter = ctx.Value("i", 0)
    print("before: win rate %.2f, steps %.1f" % evaluate(shared))
    procs = [ctx.Process(target=actor_learner, args=(r, shared, opt, counter, 350)) for r in range(2)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    bad = [p.exitcode for p in procs if p.exitcode]
    if bad:
        raise SystemExit(f"workers failed: {bad}")
    print("after %d frames: win rate %.2f, steps %.1f" % (counter.value, *evaluate(shared)))
    torch.save(shared.state_dict(), "a3c.pt")


if __name__ == "__main__":
    main()
