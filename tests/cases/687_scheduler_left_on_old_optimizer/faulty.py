"""Two-phase training: warm phase with SGD, main phase with AdamW; one object owns optimizer and schedule."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Phases:
    def __init__(self, model, steps):
        self.model, self.steps = model, steps
        self.start(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.05, total_steps=steps)

    def start(self, optimizer):
        self.optimizer = optimizer

    def switch(self, lr):
        self.start(torch.optim.AdamW(self.model.parameters(), lr=lr))

    def step(self):
        self.optimizer.step()
        self.scheduler.step()

    @property
    def lr(self):
        return self.scheduler.get_last_lr()[0]


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, a, b):
        return (self.f(a) - self.f(b)).pow(2).sum(1)


def pairs(n):
    g = torch.Generator().manual_seed(16)
    centre = torch.randn(8, 20, generator=g)
    i, j = torch.randint(0, 8, (2, n), generator=g)
    j = torch.where(torch.rand(n, generator=g) < 0.5, i, j)
    noise = lambda: 0.7 * torch.randn(n, 20, generator=g)
    return TensorDataset(centre[i] + noise(), centre[j] + noise(), (i == j).float())


def contrastive(d, same, margin=2.0):
    return (same * d + (1 - same) * (margin - d.clamp(min=1e-6).sqrt()).clamp(min=0).pow(2)).mean()


def main(warm=2, rest=4):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(13)
    model = DDP(Siamese())
    data = pairs(480)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24, sampler=sampler)
    phases = Phases(model, (warm + rest) * len(loader))
    for epoch in range(warm + rest):
        sampler.set_epoch(epoch)
        if epoch == warm:
            phases.switch(2e-3)
        total = torch.zeros(2)
        for a, b, same in loader:
            loss = contrastive(model(a, b), same)
            phases.optimizer.zero_grad()
            loss.backward()
            phases.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f} lr {phases.lr:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
