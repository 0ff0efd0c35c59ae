"""Actor/learner double DQN on a small grid: actors step environments, the learner owns replay and optimizer."""
import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SIDE, HORIZON = 5, 20
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
ROW = 4 + 1 + 1 + 4 + 1        # obs, action, reward, next obs, terminal


class GridBatch:
    def __init__(self, n, gen):
        self.n, self.gen = n, gen
        self.pos = torch.zeros(n, 2, dtype=torch.long)
        self.goal = torch.zeros(n, 2, dtype=torch.long)
        self.t = torch.zeros(n, dtype=torch.long)
        self.reset(torch.ones(n, dtype=torch.bool))

    def reset(self, mask):
        k = int(mask.sum())
        if k:
            start = torch.randint(SIDE * SIDE, (k,), generator=self.gen)
            goal = (start + 1 + torch.randint(SIDE * SIDE - 1, (k,), generator=self.gen)) % (SIDE * SIDE)
            self.pos[mask] = torch.stack([start // SIDE, start % SIDE], 1)
            self.goal[mask] = torch.stack([goal // SIDE, goal % SIDE], 1)
            self.t[mask] = 0

    def obs(self):
        return torch.cat([self.pos, self.goal], 1).float() / (SIDE - 1) * 2 - 1

    def step(self, action):
        self.pos = (self.pos + MOVES[action]).clamp(0, SIDE - 1)
        self.t += 1
        done = (self.pos == self.goal).all(1)
        reward = torch.where(done, 1.0, -0.05)
        nxt = self.obs()
        self.reset(done | (self.t >= HORIZON))     # a time-out restarts but does not count as terminal
        return nxt, reward, done


def qnet():
    return nn.Sequential(nn.Linear(4, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4))


class Replay:
    def __init__(self, cap, gen):
        self.data, self.cap, self.size, self.head, self.gen = torch.zeros(cap, ROW), cap, 0, 0, gen

    def push(self, rows):
        idx = (self.head + torch.arange(len(rows))) % self.cap
        self.data[idx] = rows
        self.head = int((self.head + len(rows)) % self.cap)
        self.size = min(self.cap, self.size + len(rows))

    def sample(self, n):
        return self.data[torch.randint(self.size, (n,), generator=self.gen)]


def push_weights(net):
    for p in net.parameters():
        dist.broadcast(p.data, src=0)


def collect(net, env, eps, steps, gen):
    rows = []
    with torch.no_grad():
        for _ in range(steps):
            o = env.obs()
            a = net(o).argmax(1)
            explore = torch.rand(env.n, generator=gen) < eps
            a = torch.where(explore, torch.randint(4, (env.n,), generator=gen), a)
            nxt, r, d = env.step(a)
            rows.append(torch.cat([o, a[:, None].float(), r[:, None], nxt, d[:, None].float()], 1))
    return torch.cat(rows)


def learn(net, target, opt, batch, gamma):
    o, a, r, nxt, d = batch.split([4, 1, 1, 4, 1], dim=1)
    with torch.no_grad():
        best = net(nxt).argmax(1, keepdim=True)
        y = r + gamma * (1 - d) * target(nxt).gather(1, best)
    loss = F.smooth_l1_loss(net(o).gather(1, a.long()), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    opt.step()
    return loss.item()


@torch.no_grad()
def success_rate(net, seed, n=400):
    env = GridBatch(n, torch.Generator().manual_seed(seed))
    alive, hit = torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    for _ in range(HORIZON - 1):
        _, _, done = env.step(net(env.obs()).argmax(1))
        hit |= done & alive
        alive &= ~done
    return hit.float().mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=400)
    ap.add_argument("--envs", type=int, default=32)
    ap.add_argument("--rollout", type=int, default=6)
    ap.add_argument("--updates", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gen = torch.Generator().manual_seed(31 + rank)
    torch.manual_seed(rank)
    net = qnet()
    n_rows = args.envs * args.rollout

    if rank == 0:
        target, opt = copy.deepcopy(net), torch.optim.Adam(net.parameters(), lr=args.lr)
        replay, buf = Replay(20_000, gen), torch.zeros(n_rows, ROW)
    else:
        env = GridBatch(args.envs, gen)

    for it in range(args.iters):
        push_weights(net)
        if rank == 0:
            for src in range(1, world):
                dist.recv(buf, src=src)
                replay.push(buf)
            for _ in range(args.updates if replay.size >= 1000 else 0):
                loss = learn(net, target, opt, replay.sample(128), gamma=0.95)
            if it % 20 == 0:
                target.load_state_dict(net.state_dict())
            if it % 100 == 99:
                print(f"iter {it} replay {replay.size} td loss {loss:.4f}", flush=True)
        else:
            eps = max(0.1, 1.0 - it / (0.6 * args.iters))
            dist.send(collect(net, env, eps, args.rollout, gen), dst=0)

    push_weights(net)
    rate = success_rate(net, seed=900 + rank)
    dist.all_reduce(rate)
    if rank == 0:
        print(f"greedy success rate {rate.item() / world:.3f}")
        torch.save(net.state_dict(), "dqn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
