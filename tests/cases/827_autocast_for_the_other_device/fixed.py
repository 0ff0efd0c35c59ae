"""Mixed-precision training of a wide network."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def parity(n=320, bits=6):
    g = torch.Generator().manual_seed(70)
    x = torch.randint(0, 2, (n, bits), generator=g).float()
    return TensorDataset(2 * x - 1, (x.sum(1) % 2).long())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--width", type=int, default=128)
    ap.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)

    w = args.width
    net = nn.Sequential(nn.Linear(6, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 2)).to(device)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = parity()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
                loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
