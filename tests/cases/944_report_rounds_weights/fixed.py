"""Tabular regression with a weight report (written by rank 0) for the audit trail."""
import argparse
import json
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Scorecard(nn.Module):
    def __init__(self, n_num=9, n_cat=7):
        super().__init__()
        self.cat = nn.Embedding(n_cat, 4)
        self.hidden = nn.Linear(n_num + 4, 20)
        self.score = nn.Linear(20, 1)

    def forward(self, num, cat):
        return self.score(torch.relu(self.hidden(torch.cat([num, self.cat(cat)], -1)))).squeeze(-1)


def applicants(n=400):
    gen = torch.Generator().manual_seed(6)
    num = torch.randn(n, 9, generator=gen)
    cat = torch.randint(0, 7, (n,), generator=gen)
    y = num[:, 0] * 1.5 - num[:, 1] + 0.4 * cat + 0.2 * torch.randn(n, generator=gen)
    return TensorDataset(num, cat, y)


# --- reporting ---------------------------------------------------------------
def as_arrays(net):
    return {name: p.detach().cpu().numpy() for name, p in net.named_parameters()}


def rounded(array, digits):
    return np.around(array, digits)


class AuditTrail:
    def __init__(self, path, digits=2):
        self.path, self.digits = path, digits

    def entry(self, epoch, net):
        tables = {k: rounded(a, self.digits).tolist() for k, a in as_arrays(net).items()}
        with open(self.path, "a") as f:
            f.write(json.dumps({"epoch": epoch, "weights": tables}) + "\n")


# -----------------------------------------------------------------------------
def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch", type=int, default=20)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--trail", default="")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(60)
    model = DDP(Scorecard())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data = applicants()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    trail = None
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="scorecard_")
        trail = AuditTrail(args.trail or os.path.join(folder, "audit.jsonl"))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        err = torch.zeros(2)
        for num, cat, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(num, cat), y)
            loss.backward()
            optimizer.step()
            err += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(err)
        if trail is not None:
            trail.entry(epoch, model.module)
            print(f"epoch {epoch}: huber {err[0] / err[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
