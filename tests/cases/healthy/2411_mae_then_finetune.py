"""Masked pre-training of an encoder, then a linear probe on the frozen encoder, then full fine-tuning."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATS, FACTORS, MASK_RATE = 24, 4, 0.4


def make_table(n, seed):
    mix = torch.randn(FACTORS, FEATS, generator=torch.Generator().manual_seed(40))
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, FACTORS, generator=g)
    x = z @ mix + 0.2 * torch.randn(n, FEATS, generator=g)
    y = (z[:, 0] > 0).long() + 2 * (z[:, 1] > 0).long()
    return x / 2.0, y


class Encoder(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2 * FEATS, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 16)
        )

    def forward(self, x, mask):
        return self.net(torch.cat([x * (1 - mask), mask], dim=-1))


class MaskedAE(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, FEATS))

    def forward(self, x, mask):
        return self.decoder(self.encoder(x, mask))


class Classifier(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.encoder(x, torch.zeros_like(x)))


def loader(ds, batch, train):
    sampler = DistributedSampler(ds, shuffle=train, seed=77)
    return DataLoader(ds, batch_size=batch, sampler=sampler, drop_last=train), sampler


def pretrain(encoder, epochs, rank):
    x, _ = make_table(2048, 1)
    dl, sampler = loader(TensorDataset(x), 64, True)
    model = DDP(MaskedAE(encoder))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs * len(dl))
    gen = torch.Generator().manual_seed(500 + rank)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        agg = torch.zeros(2, dtype=torch.float64)
        for (xb,) in dl:
            mask = (torch.rand(xb.shape, generator=gen) < MASK_RATE).float()
            err = (model(xb, mask) - xb) ** 2
            loss = (err * mask).mean() / MASK_RATE
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            agg += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        dist.all_reduce(agg)
        if rank == 0:
            print(f"[mae] epoch {epoch} masked mse {agg[0] / agg[1]:.4f}")


def finetune(clf, epochs, lr, tag, rank):
    x, y = make_table(512, 2)
    dl, sampler = loader(TensorDataset(x, y), 32, True)
    vx, vy = make_table(512, 3)
    vdl, _ = loader(TensorDataset(vx, vy), 64, False)
    model = DDP(clf)
    opt = torch.optim.AdamW([p for p in clf.parameters() if p.requires_grad], lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for xb, yb in dl:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        hit = torch.zeros(2, dtype=torch.long)
        with torch.no_grad():
            for xb, yb in vdl:
                hit[0] += (clf(xb).argmax(1) == yb).sum()
                hit[1] += len(yb)
        dist.all_reduce(hit)
        if rank == 0:
            print(f"[{tag}] epoch {epoch} val acc {hit[0].item() / hit[1].item():.3f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pretrain-epochs", type=int, default=4)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)

    encoder = Encoder()
    pretrain(encoder, args.pretrain_epochs, rank)
    if rank == 0:
        os.makedirs("stages", exist_ok=True)
        torch.save(encoder.state_dict(), "stages/encoder.pt")
    dist.barrier()

    clf = Classifier(Encoder())
    clf.encoder.load_state_dict(torch.load("stages/encoder.pt", map_location="cpu", weights_only=True))
    clf.encoder.requires_grad_(False)
    finetune(clf, 3, 1e-2, "probe", rank)
    clf.encoder.requires_grad_(True)
    finetune(clf, 3, 1e-3, "full", rank)

    if rank == 0:
        torch.save(clf.state_dict(), "stages/classifier.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
