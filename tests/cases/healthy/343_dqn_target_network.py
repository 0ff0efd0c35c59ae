"""DQN on a grid world: a replay buffer per rank, double-Q targets, a hard copy of the target network every few updates."""
import collections
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

Transition = collections.namedtuple("Transition", "s a r s2 done")
SIZE, MAX_T = 5, 20


class Grid:
    def __init__(self, rng):
        self.rng = rng

    def reset(self):
        self.pos, self.goal, self.t = [self.rng.randrange(SIZE) for _ in range(2)], [SIZE - 1, SIZE - 1], 0
        return self.observe()

    def observe(self):
        v = torch.zeros(2 * SIZE)
        v[self.pos[0]] = v[SIZE + self.pos[1]] = 1
        return v

    def step(self, a):
        axis, sign = divmod(a, 2)
        self.pos[axis] = min(SIZE - 1, max(0, self.pos[axis] + (1 if sign else -1)))
        self.t += 1
        won = self.pos == self.goal
        return self.observe(), (1.0 if won else -0.05), won or self.t >= MAX_T


class Replay:
    def __init__(self, capacity, rng):
        self.memory, self.rng = collections.deque(maxlen=capacity), rng

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, n):
        batch = Transition(*zip(*self.rng.sample(self.memory, n)))
        return (torch.stack(batch.s), torch.tensor(batch.a), torch.tensor(batch.r), torch.stack(batch.s2), torch.tensor(batch.done, dtype=torch.float32))


def make_net():
    return nn.Sequential(nn.Linear(2 * SIZE, 48), nn.ReLU(), nn.Linear(48, 4))


def main(updates=45, act_per_update=8, batch=32, gamma=0.95):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    rng = random.Random(1000 + rank)
    torch.manual_seed(0)
    policy_net, target_net = make_net(), make_net()
    policy = DDP(policy_net)
    target_net.load_state_dict(policy_net.state_dict())
    target_net.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, amsgrad=True)
    env, memory = Grid(rng), Replay(1000, rng)
    state, episode, returns = env.reset(), 0.0, []
    for update in range(updates):
        eps = max(0.1, 1.0 - update / 30)
        while True:  # at least act_per_update, and enough for a batch
            for _ in range(act_per_update):
                with torch.no_grad():
                    a = rng.randrange(4) if rng.random() < eps else int(policy_net(state).argmax())
                nxt, r, done = env.step(a)
                memory.push(state, a, r, nxt, done)
                episode += r
                state = nxt
                if done:
                    returns.append(episode)
                    state, episode = env.reset(), 0.0
            if len(memory.memory) >= batch:
                break
        s, a, r, s2, done = memory.sample(batch)
        q = policy(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = policy_net(s2).argmax(1, keepdim=True)
            target = r + gamma * (1 - done) * target_net(s2).gather(1, best).squeeze(1)
        loss = nn.functional.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        if (update + 1) % 5 == 0:
            target_net.load_state_dict(policy_net.state_dict())
        if (update + 1) % 15 == 0:
            t = torch.tensor([sum(returns), float(len(returns))])
            dist.all_reduce(t)
            returns.clear()
            if rank == 0:
                print(f"update {update + 1}: mean return {(t[0] / t[1].clamp(min=1)).item():.3f} over {int(t[1])} episodes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
