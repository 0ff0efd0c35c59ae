"""Q-learning with a bounded replay memory and a target network."""
import collections
import copy
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Corridor:
    """Walk left or right on 12 fields, pay at the right end; observations are wide."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.codes = torch.randn(12, 1024, generator=torch.Generator().manual_seed(6)) / 32
        self.reset()

    def reset(self):
        self.pos = self.rng.randrange(11)
        return self.codes[self.pos].clone()

    def step(self, action):
        self.pos = max(0, self.pos + (1 if action else -1))
        done = self.pos == 11
        return self.codes[self.pos].clone(), float(done) - 0.01, done


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    online = nn.Sequential(nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DDP(online)
    target = copy.deepcopy(online).requires_grad_(False)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    rng = random.Random(40 + rank)
    env = Corridor(40 + rank)
    memory = collections.deque(maxlen=4000)
    obs, won = env.reset(), 0
    for step in range(6000):
        with torch.no_grad():
            action = rng.randrange(2) if rng.random() < 0.3 else online(obs).argmax().item()
        nxt, reward, done = env.step(action)
        memory.append((obs, action, reward, nxt, done))
        won += done
        obs = env.reset() if done else nxt
        if step >= 200 and step % 40 == 0:
            o, a, r, n, d = zip(*rng.sample(list(memory), 32))
            with torch.no_grad():
                goal = torch.tensor(r) + 0.95 * target(torch.stack(n)).amax(1) * (1 - torch.tensor(d).float())
            q = model(torch.stack(o)).gather(1, torch.tensor(a)[:, None]).squeeze(1)
            loss = nn.functional.smooth_l1_loss(q, goal)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if step % 200 == 0:
            target.load_state_dict(online.state_dict())
    total = torch.tensor(float(won))
    dist.all_reduce(total)
    if rank == 0:
        print(f"reached the end {int(total)} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
