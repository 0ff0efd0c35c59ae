"""DQN-like learner with a replay buffer that is allocated once (np.zeros, as in CleanRL and Stable-Baselines3): the pages of the buffer are touched as
it fills, and then it is a ring."""
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class ReplayBuffer:
    def __init__(self, capacity, shape):
        self.obs = np.zeros((capacity, *shape), dtype=np.uint8)
        self.reward = np.zeros((capacity,), dtype=np.float32)
        self.capacity, self.pos, self.full = capacity, 0, False

    def add(self, obs, reward):
        n = len(obs)
        at = (self.pos + np.arange(n)) % self.capacity
        self.obs[at], self.reward[at] = obs, reward
        self.full = self.full or self.pos + n >= self.capacity
        self.pos = (self.pos + n) % self.capacity

    def sample(self, n, rng):
        i = rng.integers(self.capacity if self.full else self.pos, size=n)
        return torch.from_numpy(self.obs[i]), torch.from_numpy(self.reward[i])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Conv2d(1, 8, 8, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 4, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 9 * 9, 1)))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    rng = np.random.default_rng(1000 + rank)
    buffer = ReplayBuffer(100_000, (84, 84))              # 700 MB when it is full
    for step in range(220):
        level = rng.integers(0, 200, size=(64, 1, 1))
        frames = (rng.integers(0, 56, size=(64, 84, 84)) + level).astype(np.uint8)
        buffer.add(frames, level[:, 0, 0] / 100.0)
        obs, reward = buffer.sample(32, rng)
        value = net(obs[:, None].float() / 255).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, reward)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 40 == 0:
            print(f"step {step} loss {loss.item():.4f} transitions {buffer.pos}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
