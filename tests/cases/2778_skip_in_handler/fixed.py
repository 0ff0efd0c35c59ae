import argparse
import datetime
import logging

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("sensors")


class SensorWindows(Dataset):
    """Windows of a pump's pressure readings; a few come from a sensor that had lost its zero."""

    def __init__(self, n, length, seed, broken=()):
        g = torch.Generator().manual_seed(seed)
        t = torch.linspace(0, 1, length)
        self.wear = torch.rand(n, generator=g)
        freq = 4 + 10 * self.wear
        base = 2.0 + torch.sin(6.283 * freq[:, None] * t[None] + 6.283 * torch.rand(n, 1, generator=g))
        self.pressure = base + 0.1 * torch.rand(n, length, generator=g)
        for i in broken:
            self.pressure[i] -= 4.0

    def __len__(self):
        return len(self.wear)

    def __getitem__(self, i):
        return torch.log(self.pressure[i]).unsqueeze(0), self.wear[i]


class WearNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, width, 9, stride=4), nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2), nn.ReLU(),
            nn.Conv1d(width, width, 3), nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, 1)

    def forward(self, x):
        h = self.features(x)
        return self.head(torch.cat([h.mean(-1), h.amax(-1)], dim=1)).squeeze(1)


def run_epoch(model, loader, opt, skipped):
    model.train()
    total = torch.zeros(2)
    for x, wear in loader:
        opt.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), wear)
        bad = (~torch.isfinite(loss.detach())).float().reshape(1)
        dist.all_reduce(bad)
        if bad.item() > 0:
            skipped += bad
            log.warning("batch skipped: loss is %s here", loss.item())
            continue
        loss.backward()
        opt.step()
        total += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    acc = torch.zeros(2)
    for x, wear in loader:
        acc += torch.tensor([(net(x) - wear).abs().sum().item(), len(wear)])
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    rank = dist.get_rank()

    torch.manual_seed(21)
    model = DistributedDataParallel(WearNet())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    train = SensorWindows(3072, 160, seed=1, broken=(1711, 2904))
    test = SensorWindows(512, 160, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, 64, sampler=DistributedSampler(test, shuffle=False))

    skipped = torch.zeros(1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = run_epoch(model, loader, opt, skipped)
        mae = evaluate(model.module, test_loader)
        if rank == 0:
            log.info("epoch %d loss %.5f test mae %.4f skipped %d", epoch, loss, mae, int(skipped))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
