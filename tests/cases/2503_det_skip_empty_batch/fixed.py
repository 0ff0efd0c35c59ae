"""Center-point detector on sparse synthetic scenes (most frames are empty)."""
import argparse
import datetime
import logging

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("centerdet")


class Scenes(Dataset):
    def __init__(self, n, size=32, p_empty=0.7, seed=0):
        self.n, self.size, self.p_empty, self.seed = n, size, p_empty, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        img = 0.15 * torch.randn(1, self.size, self.size, generator=g)
        heat = torch.zeros(1, self.size // 4, self.size // 4)
        wh = torch.zeros(2, self.size // 4, self.size // 4)
        if torch.rand(1, generator=g).item() > self.p_empty:
            for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
                w, h = torch.randint(4, 9, (2,), generator=g).tolist()
                x = int(torch.randint(0, self.size - w, (1,), generator=g))
                y = int(torch.randint(0, self.size - h, (1,), generator=g))
                img[0, y:y + h, x:x + w] += 1.0
                cx, cy = (x + w // 2) // 4, (y + h // 2) // 4
                heat[0, cy, cx] = 1.0
                wh[:, cy, cx] = torch.tensor([w / 8.0, h / 8.0])
        return img, heat, wh


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class CenterDet(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.body = nn.Sequential(Block(1, ch, 2), Block(ch, ch, 2), Block(ch, ch, 1))
        self.heat = nn.Conv2d(ch, 1, 1)
        self.size = nn.Conv2d(ch, 2, 1)
        nn.init.constant_(self.heat.bias, -3.0)

    def forward(self, x):
        f = self.body(x)
        return self.heat(f), self.size(f)


def focal(logits, target, alpha=0.75, gamma=2.0):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    pt = torch.where(target > 0, p, 1 - p)
    a = torch.where(target > 0, alpha, 1 - alpha)
    return (a * (1 - pt) ** gamma * ce).sum()


def mean_over_ranks(value):
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def train_epoch(model, loader, opt, sched):
    model.train()
    meter = torch.zeros(3)
    for img, heat, wh in loader:
        n_pos = heat.sum()
        norm = mean_over_ranks(n_pos).clamp(min=1.0)
        pred_heat, pred_wh = model(img)
        l_heat = focal(pred_heat, heat) / norm
        l_size = (heat * (pred_wh - wh).abs()).sum() / norm
        opt.zero_grad()
        (l_heat + 0.5 * l_size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        sched.step()
        meter += torch.tensor([l_heat.item(), l_size.item(), 1.0])
    dist.all_reduce(meter)
    return meter[0] / meter[2], meter[1] / meter[2]


@torch.no_grad()
def evaluate(model, dataset, rank, world):
    model.eval()
    hits = torch.zeros(3)
    for i in range(rank, len(dataset), world):
        img, heat, _ = dataset[i]
        found = torch.sigmoid(model.module(img[None])[0][0]) > 0.4
        hits += torch.tensor([(found & (heat > 0)).sum().item(), found.sum().item(), heat.sum().item()])
    dist.all_reduce(hits)
    return (hits[0] / hits[1].clamp(min=1)).item(), (hits[0] / hits[2].clamp(min=1)).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=6)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=25))
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(0)

    train, val = Scenes(960, seed=1), Scenes(200, seed=2)
    sampler = DistributedSampler(train, seed=5)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)
    model = DDP(CenterDet())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        heat_loss, size_loss = train_epoch(model, loader, opt, sched)
        precision, recall = evaluate(model, val, rank, world)
        log.info("epoch %d heat %.4f size %.4f precision %.3f recall %.3f",
                 epoch, heat_loss, size_loss, precision, recall)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
