"""Contrastive pre-training of an encoder on augmented signals; runs on one process or on many."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Signals(Dataset):
    def __init__(self, n=640, length=64):
        g = torch.Generator().manual_seed(9)
        grid = torch.linspace(0, 1, length)
        freq = 2 + 10 * torch.rand(n, 1, generator=g)
        shape = torch.rand(n, 1, generator=g)
        self.clean = torch.sin(6.283 * freq * grid) * (1 - shape) + torch.sign(torch.sin(6.283 * freq * grid)) * shape

    def __len__(self):
        return len(self.clean)

    def view(self, i):
        x = self.clean[i].roll(int(torch.randint(0, 6, ())))
        return x * (0.7 + 0.6 * torch.rand(())) + 0.2 * torch.randn(x.shape)

    def __getitem__(self, i):
        return self.view(i), self.view(i)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 7, stride=2), nn.ReLU(), nn.Conv1d(16, 24, 5, stride=2), nn.ReLU())
        self.project = nn.Sequential(nn.Flatten(), nn.Linear(24 * 13, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        return F.normalize(self.project(self.conv(x[:, None])), dim=1)


def info_nce(a, b, temperature=0.2):
    logits = a @ b.T / temperature
    target = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def setup(args):
    args.distributed = torch.cuda.device_count() > 1
    args.rank, args.world = 0, 1
    args.device = torch.device("cpu")
    if torch.cuda.is_available():
        args.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(args.device)
    if args.distributed:
        dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
        args.rank, args.world = dist.get_rank(), dist.get_world_size()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--output", default="encoder.pt")
    args = ap.parse_args()
    setup(args)

    torch.manual_seed(args.seed)
    model = Encoder().to(args.device)
    if args.distributed:
        ids = [args.device.index] if args.device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids)
    torch.manual_seed(args.seed + args.rank)
    data = Signals()
    sampler = DistributedSampler(data, drop_last=True) if args.distributed else None
    loader = DataLoader(data, args.batch_size // args.world, sampler=sampler, shuffle=sampler is None, drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        total = torch.zeros((), device=args.device)
        for a, b in loader:
            a, b = a.to(args.device), b.to(args.device)
            za, zb = model(torch.cat([a, b])).chunk(2)
            loss = info_nce(za, zb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        if args.distributed:
            dist.all_reduce(total)
        if args.rank == 0:
            print(f"epoch {epoch}: loss {total.item() / (len(loader) * args.world):.4f}", flush=True)
    if args.rank == 0:
        torch.save(getattr(model, "module", model).state_dict(), args.output)
    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
