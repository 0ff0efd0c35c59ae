"""Contrastive learning against a bounded bank of earlier keys."""
import argparse
import os
from collections import deque

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


@torch.no_grad()
def follow(slow, fast, m=0.98):
    for s, f in zip(slow.parameters(), fast.parameters()):
        s.lerp_(f, 1 - m)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--bank", type=int, default=40)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    query = DDP(Encoder())
    key = Encoder().requires_grad_(False)
    key.load_state_dict(query.module.state_dict())
    torch.manual_seed(10 + rank)
    opt = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(1024, 32, generator=torch.Generator().manual_seed(3)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    bank, history = deque(maxlen=args.bank), []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            q = query(x + 0.2 * torch.randn_like(x))
            with torch.no_grad():
                k = key(x + 0.2 * torch.randn_like(x))
            logits = [(q * k).sum(1, keepdim=True)]
            if bank:
                logits.append(q @ torch.cat(list(bank)).t())
            else:
                logits.append(q @ k.roll(1, 0).t())
            loss = F.cross_entropy(torch.cat(logits, 1) / 0.2, torch.zeros(len(q), dtype=torch.long))
            opt.zero_grad()
            loss.backward()
            opt.step()
            follow(key, query.module)
            bank.append(k)
            history.append(loss.item())
        if rank == 0:
            print(f"epoch {epoch}: loss {sum(history[-len(loader):]) / len(loader):.4f}, bank {len(bank)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
