"""broadcast_buffers=False; the BatchNorm statistics and an input scale are averaged before every evaluation, the codebook's in forward."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Codes(nn.Module):
    def __init__(self, num=16, dim=8):
        super().__init__()
        self.register_buffer("book", torch.randn(num, dim))
        self.register_buffer("seen", torch.ones(num))
        self.register_buffer("sums", self.book.clone())

    def forward(self, x):
        at = torch.cdist(x.detach(), self.book).argmin(1)
        if self.training:
            told = nn.functional.one_hot(at, len(self.book)).float()
            sums, seen = told.T @ x.detach(), told.sum(0)
            dist.all_reduce(sums)
            dist.all_reduce(seen)
            self.seen.lerp_(seen, 0.05)
            self.sums.lerp_(sums, 0.05)
            self.book.copy_(self.sums / self.seen.clamp_min(1e-3).unsqueeze(1))
        found = self.book[at]
        return x + (found - x).detach(), (x - found).pow(2).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.codes, self.out = Codes(), nn.Linear(8, 16)

    def forward(self, x):
        code, commit = self.codes(self.body(x))
        return self.out(code), commit


@torch.no_grad()
def average_statistics(model):
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            for b in (m.running_mean, m.running_var):
                dist.all_reduce(b)
                b /= dist.get_world_size()


@torch.no_grad()
def measure(model, loader):
    model.eval()
    told = torch.zeros(2)
    for (x,) in loader:
        told += torch.tensor([(model(x)[0] - x).pow(2).mean().item() * len(x), len(x)])
    dist.all_reduce(told)
    model.train()
    return (told[0] / told[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(1280, 3) @ torch.randn(3, 16)
    train, test = TensorDataset(x[:1024]), TensorDataset(x[1024:])
    model = DDP(Net(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(train)
    tests = DataLoader(test, 64, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for (a,) in DataLoader(train, 32, sampler=sampler):
            out, commit = model(a)
            loss = (out - a).pow(2).mean() + 0.25 * commit
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        average_statistics(model)
        told = measure(model.module, tests)
        if rank == 0:
            print(f"epoch {epoch} error {told:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
