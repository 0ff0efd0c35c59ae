"""Pretext training, then a fresh head on a frozen body, then everything with warm restarts and weight averaging."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Plan:
    pretext_epochs: int = 4
    head_epochs: int = 3
    cycle_epochs: int = 3
    cycles: int = 3
    batch: int = 50


def spectra(n, seed, dim=40):
    """Mixtures of three peaks. Pretext: peak height of each. Final task: which peak is tallest."""
    g = torch.Generator().manual_seed(seed)
    heights = torch.rand(n, 3, generator=g)
    grid = torch.arange(dim).float()
    centre = torch.tensor([8.0, 20.0, 31.0]) + torch.randn(n, 3, generator=g)
    x = (heights[:, :, None] * torch.exp(-((grid - centre[:, :, None]) / 3) ** 2)).sum(1)
    return x + 0.05 * torch.randn(n, dim, generator=g), heights, heights.argmax(1)


class Body(nn.Module):
    def __init__(self, dim=40, width=64):
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(dim, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1),
                                 nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())

    def forward(self, x):
        return self.seq(x)


class Full(nn.Module):
    def __init__(self, body, head, frozen=False):
        super().__init__()
        self.body, self.head, self.frozen = body, head, frozen
        for p in body.parameters():
            p.requires_grad_(not frozen)

    def train(self, mode=True):
        super().train(mode)
        if self.frozen:
            self.body.eval()
        return self

    def forward(self, x):
        return self.head(self.body(x))


class Job:
    def __init__(self, plan):
        self.plan, self.rank, self.world = plan, dist.get_rank(), dist.get_world_size()
        self.x, self.heights, self.top = spectra(3000, seed=1)
        self.seed_counter = 0

    def fit(self, name, net, target, loss_fn, epochs, opt, sched=None, after_epoch=None):
        ddp = DDP(net)
        data = TensorDataset(self.x, target)
        sampler = DistributedSampler(data, self.world, self.rank, seed=self.seed_counter)
        self.seed_counter += 1
        loader = DataLoader(data, batch_size=self.plan.batch, sampler=sampler)
        ddp.train()
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            seen = torch.zeros(2)
            for i, (x, y) in enumerate(loader):
                loss = loss_fn(ddp(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                if sched is not None:
                    sched.step(epoch + (i + 1) / len(loader))
                seen += torch.tensor([loss.item() * len(x), len(x)])
            dist.all_reduce(seen)
            if after_epoch is not None:
                after_epoch(epoch)
            if self.rank == 0:
                print(f"{name} epoch {epoch} loss {seen[0] / seen[1]:.4f}", flush=True)

    @torch.no_grad()
    def accuracy(self, net):
        net.eval()
        x, _, y = spectra(2000, seed=2)
        x, y = x[self.rank::self.world], y[self.rank::self.world]
        stat = torch.stack([(net(x).argmax(1) == y).float().sum(), torch.tensor(float(len(y)))])
        dist.all_reduce(stat)
        return (stat[0] / stat[1]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = Plan()
    job = Job(plan)

    torch.manual_seed(4)
    body = Body()
    net = Full(body, nn.Linear(64, 3))
    torch.manual_seed(400 + job.rank)        # from here on only dropout and the new head use it; DDP sends rank 0's head
    job.fit("pretext", net, job.heights, F.mse_loss, plan.pretext_epochs, torch.optim.Adam(net.parameters(), lr=2e-3))

    net = Full(body, nn.Linear(64, 3), frozen=True)         # the regression head is thrown away
    opt = torch.optim.Adam(net.head.parameters(), lr=1e-2)
    job.fit("head", net, job.top, F.cross_entropy, plan.head_epochs, opt)
    probe = job.accuracy(net)

    net = Full(body, net.head)
    opt = torch.optim.SGD([{"params": net.body.parameters(), "lr": 0.02}, {"params": net.head.parameters(), "lr": 0.05}],
                          momentum=0.9)
    sched = CosineAnnealingWarmRestarts(opt, T_0=plan.cycle_epochs)
    swa = AveragedModel(net)

    def collect(epoch):
        if (epoch + 1) % plan.cycle_epochs == 0:
            swa.update_parameters(net)

    job.fit("full", net, job.top, F.cross_entropy, plan.cycle_epochs * plan.cycles, opt, sched, collect)
    last, averaged = job.accuracy(net), job.accuracy(swa)
    if job.rank == 0:
        print(f"frozen body {probe:.3f}, all layers {last:.3f}, mean of {int(swa.n_averaged)} snapshots {averaged:.3f}")
        torch.save(swa.module.state_dict(), "swa.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
