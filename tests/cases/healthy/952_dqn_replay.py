"""DQN on a corridor world: each rank plays its own episodes into its own replay memory; the Q network is shared by DDP."""
import random
from collections import deque

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LENGTH, ACTIONS = 9, 2


class Corridor:
    def __init__(self, seed):
        self.rng = random.Random(seed)

    def reset(self):
        self.pos, self.t = self.rng.randint(1, LENGTH - 2), 0
        return self.observe()

    def observe(self):
        obs = [0.0] * LENGTH
        obs[self.pos] = 1.0
        return obs

    def step(self, action):
        self.t += 1
        move = 1 if action == 1 else -1
        if self.rng.random() < 0.1:
            move = -move
        self.pos += move
        done = self.pos in (0, LENGTH - 1) or self.t >= 30
        reward = 1.0 if self.pos == LENGTH - 1 else -0.02
        return self.observe(), reward, done


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LENGTH, 48), nn.ReLU(), nn.Linear(48, ACTIONS))

    def forward(self, x):
        return self.net(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(17 * rank + 1)
    torch.manual_seed(4)
    online, target = QNet(), QNet()
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    ddp = DDP(online)
    opt = torch.optim.RMSprop(ddp.parameters(), lr=2e-3)

    env, memory = Corridor(seed=100 + rank), deque(maxlen=2000)
    obs, finished, returns, episode_return = env.reset(), 0, [], 0.0
    updates = 0
    for frame in range(900):
        epsilon = max(0.05, 1.0 - frame / 400)
        if random.random() < epsilon:
            action = random.randrange(ACTIONS)
        else:
            with torch.no_grad():  # acting needs no gradient: the bare network is enough
                action = online(torch.tensor(obs).unsqueeze(0)).argmax(1).item()
        nxt, reward, done = env.step(action)
        memory.append((obs, action, reward, nxt, done))
        episode_return += reward
        obs = nxt
        if done:
            obs, finished = env.reset(), finished + 1
            returns.append(episode_return)
            episode_return = 0.0

        if frame >= 200 and frame % 4 == 0:
            batch = random.sample(memory, 32)  # with replacement over time: the same frame is learned from many times
            s, a, r, n, d = (torch.tensor(col) for col in zip(*batch))
            q = ddp(s).gather(1, a.unsqueeze(1)).squeeze(1)
            with torch.no_grad():
                best = online(n).argmax(1, keepdim=True)
                goal = r + 0.95 * target(n).gather(1, best).squeeze(1) * (~d)
            loss = F.smooth_l1_loss(q, goal)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 10.0)
            opt.step()
            updates += 1
            if updates % 40 == 0:
                target.load_state_dict(online.state_dict())

        if frame % 300 == 299:
            stats = torch.tensor([sum(returns), float(len(returns))])
            dist.all_reduce(stats)
            returns.clear()
            if rank == 0:
                print(f"frame {(frame + 1) * world}: mean return {(stats[0] / stats[1].clamp(min=1)).item():.3f} over {int(stats[1])} episodes, eps {epsilon:.2f}")
    print(f"[rank {rank}] played {finished} episodes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
