"""Advantage actor-critic: every process plays its own corridor episodes, gradients are shared."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


class Corridor:
    def __init__(self, length, rng):
        self.length, self.rng = length, rng

    def reset(self):
        self.pos, self.t = int(torch.randint(1, self.length - 1, (1,), generator=self.rng)), 0
        return self.observe()

    def observe(self):
        return torch.nn.functional.one_hot(torch.tensor(self.pos), self.length).float()

    def step(self, action):
        self.pos += 1 if action == 1 else -1
        self.t += 1
        if self.pos == self.length - 1:
            return self.observe(), 1.0, True
        return self.observe(), -0.02, self.pos == 0 or self.t >= 30


class ActorCritic(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def play(env, policy, gamma=0.95):
    obs, done, trace = env.reset(), False, []
    while not done:
        action = Categorical(logits=policy(obs)[0]).sample().item()
        nxt, reward, done = env.step(action)
        trace.append((obs, action, reward))
        obs = nxt
    ret, out = 0.0, []
    for o, a, r in reversed(trace):
        ret = r + gamma * ret
        out.append((o, a, ret))
    return out, sum(r for _, _, r in trace)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(ActorCritic(9))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    torch.manual_seed(10 + rank)
    env = Corridor(9, torch.Generator().manual_seed(500 + rank))
    for update in range(40):
        batch, scores = [], []
        for _ in range(6):
            steps, score = play(env, net.module)
            batch += steps
            scores.append(score)
        obs = torch.stack([b[0] for b in batch])
        act = torch.tensor([b[1] for b in batch])
        ret = torch.tensor([b[2] for b in batch])
        count = torch.tensor(float(len(batch)))
        dist.all_reduce(count)
        logits, value = net(obs)
        pi = Categorical(logits=logits)
        adv = (ret - value).detach()
        per_step = -pi.log_prob(act) * adv + 0.5 * (ret - value) ** 2 - 0.01 * pi.entropy()
        loss = per_step.sum() * world / count
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        s = torch.tensor([sum(scores), len(scores)])
        dist.all_reduce(s)
        if rank == 0 and update % 10 == 0:
            print(f"update {update}: mean score {(s[0] / s[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
