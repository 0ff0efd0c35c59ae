"""Regression with MC-dropout: uncertainty is measured with dropout *active* in evaluation."""
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Sines(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 1, generator=g) * 6 - 3
        self.y = torch.sin(2 * self.x) + 0.1 * torch.randn(n, 1, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class MLP(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(p), nn.Linear(64, 64), nn.Tanh(), nn.Dropout(p), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


def enable_dropout(model):
    """MC dropout: everything in eval, only Dropout layers in train mode."""
    model.eval()
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.train()


@torch.no_grad()
def mc_predict(model, x, T=12):
    enable_dropout(model)
    draws = torch.stack([model(x) for _ in range(T)])
    model.eval()
    return draws.mean(0), draws.std(0)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DistributedDataParallel(MLP())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = Sines(512, 0), Sines(128, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32, sampler=sampler)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
        # exact shards without padding: 128 / world
        idx = torch.arange(rank, len(test), world)
        mean, std = mc_predict(model.module, test.x[idx])
        err = (mean - test.y[idx]).abs()
        stats = torch.stack([err.sum(), std.sum(), (err < 2 * std + 0.2).float().sum(), torch.tensor(float(len(idx)))])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} mae {stats[0]/stats[3]:.3f} sigma {stats[1]/stats[3]:.3f} covered {stats[2]/stats[3]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
