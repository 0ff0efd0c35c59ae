"""Stochastic weight averaging with SyncBatchNorm-free BN: averaged weights, statistics recomputed at the end, cyclic rate."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(6, 16, generator=torch.Generator().manual_seed(99))
    y = torch.randint(0, 6, (n,), generator=g)
    return TensorDataset(centres[y] + 1.3 * torch.randn(n, 16, generator=g), y)


def network():
    return nn.Sequential(nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 6))


@torch.no_grad()
def recompute_bn(model, loader):
    """Exact statistics of the averaged weights over the whole training set (cumulative mean); the same on every rank."""
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    kept = [m.momentum for m in layers]
    for m in layers:
        m.reset_running_stats()
        m.momentum = None
    model.train()
    for x, _ in loader:
        model(x)
    model.eval()
    for m, momentum in zip(layers, kept):
        m.momentum = momentum


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    x, y = data.tensors
    return (model(x).argmax(1) == y).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(21)
    net = network()
    model = DDP(net)
    swa = AveragedModel(net)
    train, test = blobs(384, 1), blobs(200, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=24, sampler=sampler, drop_last=True)
    plain = DataLoader(train, batch_size=64)  # no sampler: the statistics have to see all of it
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=3)
    flat = SWALR(opt, swa_lr=0.05, anneal_epochs=1)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch >= 3:
            swa.update_parameters(net)
            flat.step()
        else:
            cosine.step()
        if rank == 0:
            print(f"epoch {epoch}: lr {opt.param_groups[0]['lr']:.3f} last weights {accuracy(net, test):.3f}")
    recompute_bn(swa, plain)
    if rank == 0:
        print(f"averaged over {int(swa.n_averaged)} epochs: {accuracy(swa, test):.3f}")
        torch.save(swa.module.state_dict(), os.path.join(os.environ.get("TMPDIR", "/tmp"), f"swa_{os.getpid()}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
