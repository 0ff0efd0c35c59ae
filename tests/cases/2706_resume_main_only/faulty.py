"""Discrete denoising of token sequences, trained in two legs with a restart from a step checkpoint."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--first_leg", type=int, default=3)
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--vocab", type=int, default=20)
    p.add_argument("--length", type=int, default=12)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--save_dir", default="model_name_bert")
    return p.parse_args()


def corpus(args, count):
    g = torch.Generator().manual_seed(2024)
    start = torch.randint(0, args.vocab - 1, (count, 1), generator=g)
    stride = torch.randint(1, 4, (count, 1), generator=g)
    return (start + stride * torch.arange(args.length)) % (args.vocab - 1)


class Denoiser(nn.Module):
    def __init__(self, vocab, length, dim=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(1, length, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.encoder(self.tok(ids) + self.pos))


def ckpt_path(args, epoch):
    return os.path.join(args.save_dir, f"epoch_{epoch}.th")


def save(args, epoch, model, optimizer, scheduler):
    if dist.get_rank() == 0:
        os.makedirs(args.save_dir, exist_ok=True)
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                    "warmup_scheduler": scheduler.state_dict()}, ckpt_path(args, epoch))
    dist.barrier()


def build(args, load_epoch, steps_per_epoch):
    rank = dist.get_rank()
    model = Denoiser(args.vocab, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 30))
    if load_epoch is not None:
        ckpt = torch.load(ckpt_path(args, load_epoch), map_location="cpu")
        scheduler.load_state_dict(ckpt["warmup_scheduler"])
        if rank == 0:
            model.load_state_dict(ckpt["model"])
            optimizer.load_state_dict(ckpt["optimizer"])
            print(f"resumed from {ckpt_path(args, load_epoch)}", flush=True)
    return DDP(model), optimizer, scheduler


def run_leg(args, first, last, load_epoch, loader, sampler, mask_rng):
    model, optimizer, scheduler = build(args, load_epoch, len(loader))
    rank = dist.get_rank()
    mask_id = args.vocab - 1
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        total = torch.zeros(3)
        for (ids,) in loader:
            ratio = torch.rand(len(ids), 1, generator=mask_rng) * 0.6 + 0.1
            masked = torch.rand(ids.shape, generator=mask_rng) < ratio
            masked[:, 0] = True
            logits = model(ids.masked_fill(masked, mask_id))
            loss = F.cross_entropy(logits[masked], ids[masked])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            hit = (logits.detach()[masked].argmax(-1) == ids[masked]).float().mean()
            total += torch.tensor([loss.item(), hit.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[2]:.4f} acc {total[1] / total[2]:.4f} "
                  f"lr {scheduler.get_last_lr()[0]:.5f}", flush=True)
        save(args, epoch, model, optimizer, scheduler)


def main():
    args = get_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    data = TensorDataset(corpus(args, 1536))
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    mask_rng = torch.Generator().manual_seed(args.seed * 1000 + dist.get_rank())

    run_leg(args, 0, args.first_leg, None, loader, sampler, mask_rng)
    run_leg(args, args.first_leg, args.epochs, args.first_leg - 1, loader, sampler, mask_rng)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
