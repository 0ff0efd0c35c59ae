"""A3C in the old way: workers keep a local copy, push gradients into the shared model (p._grad = ...) and step a shared RMSprop; a test
process only reads. n=1: the script starts its processes itself."""
import math
import os
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F


class SharedRMSprop(torch.optim.RMSprop):
    def __init__(self, params, lr=2e-3, alpha=0.99):
        super().__init__(params, lr=lr, alpha=alpha)
        for grp in self.param_groups:
            for p in grp["params"]:
                s = self.state[p]
                s["step"] = torch.zeros(())
                s["square_avg"] = torch.zeros_like(p)
        self.share_memory()

    def share_memory(self):
        for grp in self.param_groups:
            for p in grp["params"]:
                self.state[p]["step"].share_memory_()
                self.state[p]["square_avg"].share_memory_()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 32)
        self.pi, self.v = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.pi(h), self.v(h).squeeze(-1)


class Walk:
    """go to the origin on a line"""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def reset(self):
        self.p, self.t = torch.randn(1, generator=self.g).item() * 2, 0
        return self.obs()

    def obs(self):
        return torch.tensor([self.p, math.tanh(self.p), abs(self.p), self.t / 20, 1.0])

    def step(self, a):
        self.p += (a - 1) * 0.3
        self.t += 1
        return self.obs(), -abs(self.p) * 0.1, self.t >= 20


def ensure_shared_grads(local, shared):
    for lp, sp in zip(local.parameters(), shared.parameters()):
        sp._grad = lp.grad


def worker(rank, shared, opt, counter, lock, episodes):
    torch.manual_seed(10 + rank)
    env, local = Walk(rank), ActorCritic()
    while True:
        with lock:
            if counter.value >= episodes:
                return
            counter.value += 1
        local.load_state_dict(shared.state_dict())
        s, logps, vals, rews, ents, done = env.reset(), [], [], [], [], False
        while not done:
            logit, v = local(s)
            d = torch.distributions.Categorical(logits=logit)
            a = d.sample()
            s, r, done = env.step(a.item())
            logps.append(d.log_prob(a)); vals.append(v); rews.append(r); ents.append(d.entropy())
        R, rets = 0.0, []
        for r in reversed(rews):
            R = r + 0.95 * R
            rets.append(R)
        rets = torch.tensor(rets[::-1])
        vals = torch.stack(vals)
        loss = (-(torch.stack(logps) * (rets - vals.detach())).mean() + 0.5 * F.mse_loss(vals, rets) - 0.01 * torch.stack(ents).mean())
        local.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(local.parameters(), 10.0)
        ensure_shared_grads(local, shared)
        opt.step()


def tester(shared, counter, episodes):
    import time
    env, net = Walk(999), ActorCritic()
    net.eval()
    while counter.value < episodes:
        net.load_state_dict(shared.state_dict())
        s, tot, done = env.reset(), 0.0, False
        with torch.no_grad():
            while not done:
                s, r, done = env.step(net(s)[0].argmax().item())
                tot += r
        print(f"after {counter.value} episodes: return {tot:.2f}", flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    mp.set_start_method("spawn")
    torch.manual_seed(0)
    shared = ActorCritic()
    shared.share_memory()
    opt = SharedRMSprop(shared.parameters())
    counter, lock = mp.Value("i", 0), mp.Lock()
    ps = [mp.Process(target=tester, args=(shared, counter, 120))]
    ps += [mp.Process(target=worker, args=(r, shared, opt, counter, lock, 120)) for r in range(2)]
    [p.start() for p in ps]
    [p.join() for p in ps]
    print("done", counter.value)
