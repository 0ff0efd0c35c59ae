"""ResNet-like classifier with weight averaging at the end and re-estimated batch statistics."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.f = nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1, bias=False),
                               nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1, bias=False))

    def forward(self, x):
        return x + self.f(x)


def net(classes):
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), Res(12), nn.MaxPool2d(2), Res(12), nn.BatchNorm2d(12), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, classes))


def blobs(n, classes, seed):
    g = torch.Generator().manual_seed(seed)
    proto = F.interpolate(torch.randn(classes, 1, 4, 4, generator=torch.Generator().manual_seed(0)), size=10)
    y = torch.randint(classes, (n,), generator=g)
    return TensorDataset(proto[y] + torch.randn(n, 1, 10, 10, generator=g), y)


def mean_buffers(module, world):
    for b in module.buffers():
        if b.is_floating_point():
            dist.all_reduce(b)
            b /= world


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    c = torch.zeros(2)
    for x, y in loader:
        c += torch.tensor([(model(x).argmax(1) == y).sum().item(), float(len(y))])
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--swa-start", type=int, default=3)
    ap.add_argument("--classes", type=int, default=6)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DDP(net(args.classes))
    averaged = AveragedModel(model.module)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)
    flat = SWALR(opt, swa_lr=0.02, anneal_epochs=1)
    train, test = blobs(1024, args.classes, 1), blobs(512, args.classes, 2)
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, batch_size=128, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        s = torch.zeros(1)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
            s += loss.detach()
        if epoch >= args.swa_start:
            averaged.update_parameters(model.module)
            flat.step()
        else:
            cosine.step()
        dist.all_reduce(s)
        mean_buffers(model.module, world)
        acc = accuracy(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {s.item() / world / len(loader):.4f} acc {acc:.3f} lr {opt.param_groups[0]['lr']:.4f}", flush=True)
    update_bn(loader, averaged)
    mean_buffers(averaged, world)
    acc = accuracy(averaged, test_loader)
    if rank == 0:
        print(f"averaged weights: acc {acc:.3f} over {int(averaged.n_averaged)} snapshots")
        torch.save(averaged.module.state_dict(), "swa.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
