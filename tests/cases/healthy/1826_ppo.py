"""PPO with an environment per rank: advantages normalised over all ranks, several epochs over each rollout."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class Env:
    """8 walkers on a line; action 0 or 1 moves, reward for nearness to 0."""
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.pos = torch.randn(8, generator=self.g) * 2

    def step(self, a):
        self.pos = self.pos + 0.5 * (a.float() * 2 - 1) + 0.1 * torch.randn(8, generator=self.g)
        lost = self.pos.abs() > 4
        reward = 1 - self.pos.abs() / 2
        self.pos = torch.where(lost, torch.randn(8, generator=self.g) * 2, self.pos)
        return self.obs(), reward, lost.float()

    def obs(self):
        return torch.stack([self.pos, self.pos.square()], 1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, o):
        h = self.body(o)
        return self.pi(h), self.v(h).squeeze(-1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
agent = DDP(Agent())
torch.manual_seed(100 + rank)
opt = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
env = Env(rank)
for it in range(12):
    O, A, L, R, D, V = [], [], [], [], [], []
    with torch.no_grad():
        o = env.obs()
        for _ in range(32):
            logits, v = agent.module(o)
            p = Categorical(logits=logits)
            a = p.sample()
            nxt, r, d = env.step(a)
            O.append(o); A.append(a); L.append(p.log_prob(a)); R.append(r); D.append(d); V.append(v)
            o = nxt
        last = agent.module(o)[1]
        adv, gae = [], torch.zeros(8)
        for t in reversed(range(32)):
            delta = R[t] + 0.95 * last * (1 - D[t]) - V[t]
            gae = delta + 0.9 * (1 - D[t]) * gae
            adv.insert(0, gae)
            last = V[t]
    O, A, L, V, adv = torch.cat(O), torch.cat(A), torch.cat(L), torch.cat(V), torch.cat(adv)
    ret = adv + V
    s = torch.tensor([adv.sum(), adv.square().sum(), float(len(adv))])
    dist.all_reduce(s)
    mean = s[0] / s[2]
    adv = (adv - mean) / (s[1] / s[2] - mean**2).sqrt().clamp(min=1e-6)
    for _ in range(3):
        for i in torch.randperm(len(O)).split(64):
            logits, v = agent(O[i])
            p = Categorical(logits=logits)
            ratio = (p.log_prob(A[i]) - L[i]).exp()
            pg = -torch.min(ratio * adv[i], ratio.clamp(0.8, 1.2) * adv[i]).mean()
            loss = pg + 0.5 * (v - ret[i]).square().mean() - 0.01 * p.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            opt.step()
    reward = torch.stack(R).mean()
    dist.all_reduce(reward)
    if rank == 0:
        print(f"iteration {it} reward {reward.item() / world:.3f}")
dist.destroy_process_group()
