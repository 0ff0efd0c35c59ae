"""Beat classification on ECG-like traces; stochastic weight averaging over the last epochs, batch norm re-estimated."""
import argparse
import logging

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

LENGTH, CLASSES = 96, 5
logger = logging.getLogger(__name__)


def beats(n, seed):
    """Three bumps (P, QRS, T); the class moves, widens, inverts or drops one of them."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    t = torch.linspace(0, 1, LENGTH).unsqueeze(0)
    c = y.unsqueeze(1)
    shift = 0.04 * torch.randn(n, 1, generator=g)

    def bump(centre, width, height):
        return height * torch.exp(-0.5 * ((t - centre - shift) / width) ** 2)

    zero = torch.zeros(n, 1)
    p = bump(0.25, 0.03, torch.where(c == 1, zero, zero + 0.25))
    qrs = bump(0.45, torch.where(c == 2, zero + 0.045, zero + 0.02), zero + 1.0)
    twave = bump(torch.where(c == 4, zero + 0.80, zero + 0.70), 0.05, torch.where(c == 3, zero - 0.3, zero + 0.3))
    gain = 0.8 + 0.4 * torch.rand(n, 1, generator=g)
    return TensorDataset((gain * (p + qrs + twave) + 0.12 * torch.randn(n, LENGTH, generator=g)).unsqueeze(1), y)


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(width, width, 5, padding=2, bias=False), nn.BatchNorm1d(width), nn.ReLU(),
                                  nn.Conv1d(width, width, 5, padding=2, bias=False), nn.BatchNorm1d(width))

    def forward(self, x):
        return torch.relu(x + self.body(x))


def build(width=24):
    return nn.Sequential(nn.Conv1d(1, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm1d(width), nn.ReLU(),
                         ResBlock(width), nn.MaxPool1d(2), ResBlock(width), nn.AdaptiveAvgPool1d(6), nn.Flatten(),
                         nn.Linear(6 * width, CLASSES))


def share_buffers(module):
    """Give every rank the batch-norm statistics of rank 0."""
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


@torch.no_grad()
def evaluate(module, loader):
    module.eval()
    stats = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = module(x)
        stats += torch.tensor([nn.functional.cross_entropy(logits, y, reduction="sum").item(),
                               (logits.argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(stats)
    module.train()
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def run(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = beats(cfg.train_size, seed=1), beats(cfg.test_size, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=cfg.seed, drop_last=True)
    train_loader = DataLoader(train, cfg.batch, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), 128)

    torch.manual_seed(cfg.seed)
    ddp = DDP(build())
    # Outside DDP: it is never trained, and equal on all ranks since it averages weights that are equal on all ranks.
    averaged = AveragedModel(ddp.module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cfg.epochs)
    swa_schedule = SWALR(optimizer, swa_lr=cfg.swa_lr, anneal_epochs=1, anneal_strategy="linear")

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        in_swa = epoch >= cfg.swa_start
        if in_swa:
            averaged.update_parameters(ddp.module)
            swa_schedule.step()
        else:
            decay.step()
        dist.all_reduce(total)
        share_buffers(ddp.module)
        val_loss, val_acc = evaluate(ddp.module, test_loader)
        logger.info("epoch %d%s train %.4f val %.4f acc %.3f lr %.4f", epoch, " swa" if in_swa else "",
                    total.item() / (world * len(train_loader)), val_loss, val_acc, optimizer.param_groups[0]["lr"])

    # Activations of the averaged weights have other statistics. Rank 0 estimates them over the whole training set.
    if rank == 0:
        update_bn(DataLoader(train, batch_size=128), averaged)
    share_buffers(averaged)
    loss, acc = evaluate(averaged, test_loader)
    logger.info("averaged over %d epochs: val %.4f acc %.3f", int(averaged.n_averaged), loss, acc)
    if rank == 0:
        torch.save(averaged.module.state_dict(), "swa.pt")


def main():
    ap = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    ap.add_argument("--epochs", type=int, default=7)
    ap.add_argument("--swa-start", type=int, default=3)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--swa-lr", type=float, default=0.03)
    ap.add_argument("--train-size", type=int, default=960)
    ap.add_argument("--test-size", type=int, default=501)
    ap.add_argument("--seed", type=int, default=14)
    cfg = ap.parse_args()
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING, format="%(name)s: %(message)s")
    try:
        run(cfg)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
