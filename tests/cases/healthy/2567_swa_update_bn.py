"""Residual conv net with stochastic weight averaging; batch-norm statistics are rebuilt on shards and merged."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    angle = y.float() * 3.1416 / 5 + 0.1 * torch.randn(n, generator=g)
    grid = torch.stack(torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij"))
    phase = torch.rand(n, generator=g) * 6.28
    wave = torch.cos(angle)[:, None, None] * grid[0] + torch.sin(angle)[:, None, None] * grid[1]
    x = torch.sin(1.1 * wave + phase[:, None, None]) * 2 + 1 + torch.randn(n, 14, 14, generator=g)
    return TensorDataset(x.unsqueeze(1), y)


class Res(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.b1, self.b2 = nn.BatchNorm2d(ch), nn.BatchNorm2d(ch)

    def forward(self, x):
        return F.relu(x + self.b2(self.c2(F.relu(self.b1(self.c1(x))))))


class Net(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, ch, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(ch), nn.ReLU())
        self.body = nn.Sequential(Res(ch), Res(ch))
        self.fc = nn.Linear(ch, 5)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).amax((2, 3)))


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    c = torch.zeros(2)
    for x, y in loader:
        c += torch.tensor([(model(x).argmax(1) == y).sum().item(), float(len(y))])
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


@torch.no_grad()
def merge_statistics(model):
    """Pool the per-process running statistics: mean of means, and the law of total variance."""
    world = dist.get_world_size()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            second = m.running_var + m.running_mean**2
            dist.all_reduce(m.running_mean)
            dist.all_reduce(second)
            m.running_mean /= world
            m.running_var.copy_(second / world - m.running_mean**2)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--swa-start", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(Net())
    swa = AveragedModel(model.module)
    train, val = textures(1536, 7), textures(512, 8)
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, 48, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, 128, sampler=DistributedSampler(val, shuffle=False))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.swa_start)
    swa_lr = SWALR(opt, swa_lr=0.03, anneal_epochs=1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch >= args.swa_start:
            swa.update_parameters(model.module)
            swa_lr.step()
        else:
            cosine.step()
        for b in model.module.buffers():
            dist.broadcast(b, src=0)
        acc = accuracy(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch} lr {opt.param_groups[0]['lr']:.3f} val acc {acc:.3f}", flush=True)

    update_bn(loader, swa)
    merge_statistics(swa)
    acc = accuracy(swa, val_loader)
    if rank == 0:
        print(f"averaged over {int(swa.n_averaged)} epochs: val acc {acc:.3f}", flush=True)
        torch.save(swa.module.state_dict(), "swa.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
