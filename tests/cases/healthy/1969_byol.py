"""BYOL on sensor windows: online network in DDP, target network an exponential moving average of it."""
import copy
import logging
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CHANNELS, WINDOW, ACTIVITIES = 3, 48, 6


def make_windows(n, seed):
    """Accelerometer-like windows: activity sets the base frequency and the harmonic."""
    g = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % ACTIVITIES
    t = torch.linspace(0, 1, WINDOW)
    f = (2 + 1.5 * label.float()).view(-1, 1, 1)
    phase = 2 * math.pi * torch.rand(n, CHANNELS, 1, generator=g)
    gain = 0.6 + 0.8 * torch.rand(n, CHANNELS, 1, generator=g)
    x = gain * (torch.sin(2 * math.pi * f * t + phase) + 0.4 * torch.sin(4 * math.pi * f * t + phase))
    return x + 0.3 * torch.randn(n, CHANNELS, WINDOW, generator=g), label


def jitter(x, generator):
    scale = 1 + 0.4 * torch.randn(x.size(0), CHANNELS, 1, generator=generator)
    shift = int(torch.randint(WINDOW, (1,), generator=generator))
    return torch.roll(x * scale, shift, dims=2) + 0.3 * torch.randn(x.shape, generator=generator)


def mlp(din, hidden, dout):
    return nn.Sequential(nn.Linear(din, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, dout))


class Backbone(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(CHANNELS, width, 7, padding=3), nn.GroupNorm(4, width), nn.ReLU(),
                                 nn.Conv1d(width, width, 5, stride=2, padding=2), nn.GroupNorm(4, width), nn.ReLU())

    def forward(self, x):
        h = self.net(x)
        return torch.cat([h.mean(2), h.amax(2)], dim=1)


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(Backbone(), mlp(96, 96, 32))
        self.predictor = mlp(32, 96, 32)

    def forward(self, views):
        return self.predictor(self.encoder(views))


class Byol:
    def __init__(self, total_steps, batch, lr=1e-3, tau0=0.99):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.batch, self.total_steps, self.tau0 = batch, total_steps, tau0
        torch.manual_seed(31)
        self.online = DDP(Online())
        # Copied after DDP's broadcast. Every process updates its copy from the same weights, so copies stay equal.
        self.target = copy.deepcopy(self.online.module.encoder).requires_grad_(False).eval()
        self.optimizer = torch.optim.AdamW(self.online.parameters(), lr=lr, weight_decay=1e-4)
        self.generator = torch.Generator().manual_seed(500 + self.rank)
        self.step_no = 0

    def tau(self):
        return 1 - (1 - self.tau0) * (math.cos(math.pi * self.step_no / self.total_steps) + 1) / 2

    def train_step(self, x):
        a, b = jitter(x, self.generator), jitter(x, self.generator)
        prediction = F.normalize(self.online(torch.cat([a, b])), dim=1)
        with torch.no_grad():
            projection = F.normalize(self.target(torch.cat([b, a])), dim=1)
        loss = (2 - 2 * (prediction * projection).sum(1)).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.update_target()
        self.step_no += 1
        return loss.detach()

    @torch.no_grad()
    def update_target(self):
        tau = self.tau()
        for t, o in zip(self.target.parameters(), self.online.module.encoder.parameters()):
            t.mul_(tau).add_(o, alpha=1 - tau)

    def epoch(self, data, epoch):
        # The same permutation everywhere, each process takes its own equal part of every global batch.
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        step = self.batch * self.world
        total, count = torch.zeros(()), 0
        for start in range(0, len(data) - step + 1, step):
            lo = start + self.rank * self.batch
            total += self.train_step(data[order[lo:lo + self.batch]])
            count += 1
        dist.all_reduce(total)
        return total.item() / (count * self.world)

    @torch.no_grad()
    def features(self, x):
        """Target features of all rows of x, computed in equal parts."""
        assert len(x) % self.world == 0
        part = self.target[0](x.chunk(self.world)[self.rank])
        parts = [torch.empty_like(part) for _ in range(self.world)]
        dist.all_gather(parts, part)
        return torch.cat(parts)


def ridge_probe(train_x, train_y, test_x, test_y, weight=1.0):
    one = torch.ones(len(train_x), 1)
    a = torch.cat([train_x, one], 1).double()
    y = F.one_hot(train_y, ACTIVITIES).double()
    w = torch.linalg.solve(a.T @ a + weight * torch.eye(a.size(1), dtype=torch.double), a.T @ y)
    scores = torch.cat([test_x, torch.ones(len(test_x), 1)], 1).double() @ w
    return (scores.argmax(1) == test_y).double().mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="[%(levelname)s] %(message)s")
    epochs, batch = 6, 32
    train_x, train_y = make_windows(1152, seed=1)
    test_x, test_y = make_windows(384, seed=2)
    steps = epochs * (len(train_x) // (batch * dist.get_world_size()))
    learner = Byol(steps, batch)
    for epoch in range(epochs):
        loss = learner.epoch(train_x, epoch)
        logging.info("epoch %d loss %.4f tau %.4f", epoch, loss, learner.tau())

    train_f, test_f = learner.features(train_x), learner.features(test_x)
    logging.info("feature std %.3f", train_f.std(0).mean())
    if rank == 0:
        logging.info("linear probe accuracy %.3f", ridge_probe(train_f, train_y, test_f, test_y))
        torch.save({"online": learner.online.module.state_dict(), "target": learner.target.state_dict()}, "byol.tmp")
        os.replace("byol.tmp", "byol.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
