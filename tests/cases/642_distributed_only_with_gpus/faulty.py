"""Gene-expression classifier, runs with or without torchrun."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def init_distributed(args):
    args.distributed = torch.cuda.device_count() > 1
    args.rank, args.world = 0, 1
    if args.distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        args.rank, args.world = dist.get_rank(), dist.get_world_size()
    return args


def expression(n=320, genes=60):
    g = torch.Generator().manual_seed(44)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.randn(n, genes, generator=g)
    x[:, :9] += 1.2 * nn.functional.one_hot(y, 3).repeat(1, 3)
    return TensorDataset(x, y)


def total(args, t):
    if args.distributed:
        dist.all_reduce(t)
    return t


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = init_distributed(ap.parse_args())
    torch.manual_seed(0)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    model = nn.Sequential(nn.Linear(60, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    data = expression()
    sampler = None
    if args.distributed:
        model = DDP(model)
        sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, shuffle=sampler is None, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        c = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            c += torch.stack([(out.argmax(1) == y).sum().float(), torch.tensor(float(len(y)), device=device)])
        c = total(args, c)
        if args.rank == 0:
            print(f"epoch {epoch}: accuracy {c[0] / c[1]:.3f} on {args.world} processes")
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
