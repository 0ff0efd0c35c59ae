"""Two-tower contrastive training; features of the accumulated micro-batches are cached and re-used."""
import logging
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Args:
    epochs: int = 5
    batch_size: int = 32
    accum_freq: int = 2
    lr: float = 2e-3
    wd: float = 0.1
    warmup: int = 5
    seed: int = 0
    rank: int = 0
    world_size: int = 1


class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        base = torch.Generator().manual_seed(77)
        self.emb = torch.randn(20, 24, generator=base)
        self.text = torch.randint(0, 20, (n, 6), generator=g)
        mix = torch.randn(6, 24, 40, generator=base) / 10
        self.image = torch.einsum("ntd,tdk->nk", self.emb[self.text], mix) + 0.05 * torch.randn(n, 40, generator=g)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        return self.image[i], self.text[i]


class CLIP(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(40, 128), nn.GELU(), nn.Linear(128, d))
        self.tok = nn.Embedding(20, d)
        self.pos = nn.Parameter(0.02 * torch.randn(6, d))
        self.enc = nn.TransformerEncoderLayer(d, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.text_proj = nn.Linear(d * 6, d)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        im = F.normalize(self.visual(image), dim=-1)
        tx = F.normalize(self.text_proj(self.enc(self.tok(text) + self.pos).flatten(1)), dim=-1)
        return {"image_features": im, "text_features": tx, "logit_scale": self.logit_scale.exp()}


class ClipLoss(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world = rank, world

    def forward(self, image_features, text_features, logit_scale):
        all_i = torch.cat(torch.distributed.nn.all_gather(image_features), dim=0)
        all_t = torch.cat(torch.distributed.nn.all_gather(text_features), dim=0)
        li = logit_scale * image_features @ all_t.T
        lt = logit_scale * text_features @ all_i.T
        n = li.shape[0]
        labels = torch.arange(n) + n * self.rank
        return (F.cross_entropy(li, labels) + F.cross_entropy(lt, labels)) / 2


def unwrap(m):
    return m.module if hasattr(m, "module") else m


def train_one_epoch(model, loader, loss_fn, opt, sched, epoch, args):
    model.train()
    n_per = len(loader) // args.accum_freq
    acc_i, acc_x, acc_t = [], [], {}
    last = None
    for i, (images, texts) in enumerate(loader):
        i_acc = i // args.accum_freq
        sched(n_per * epoch + i_acc)
        with torch.no_grad():
            out = model(images, texts)
            out.pop("logit_scale")
            for k, v in out.items():
                acc_t.setdefault(k, []).append(v)
        acc_i.append(images)
        acc_x.append(texts)
        if (i + 1) % args.accum_freq > 0:
            continue
        opt.zero_grad()
        for j in range(args.accum_freq):
            out = model(acc_i[j], acc_x[j])
            scale = out.pop("logit_scale")
            inputs = {k: torch.cat(acc_t[k][:j] + [out[k]] + acc_t[k][j + 1:]) for k in acc_t}
            loss = loss_fn(**inputs, logit_scale=scale)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        acc_i, acc_x, acc_t = [], [], {}
        with torch.no_grad():
            unwrap(model).logit_scale.clamp_(0, math.log(100))
        last = loss.item()
    t = torch.tensor([last])
    dist.all_reduce(t)
    if args.rank == 0:
        logging.info("epoch %d loss %.4f scale %.2f", epoch, t.item() / args.world_size,
                     unwrap(model).logit_scale.exp().item())


@torch.no_grad()
def evaluate(model, ds):
    model.eval()
    out = unwrap(model)(ds.image, ds.text)
    rank = (out["image_features"] @ out["text_features"].T).argsort(dim=1, descending=True)
    pos = (rank == torch.arange(len(rank)).unsqueeze(1)).float().argmax(dim=1)
    return {"R@1": (pos < 1).float().mean().item(), "R@5": (pos < 5).float().mean().item()}


def main():
    dist.init_process_group("gloo")
    args = Args(rank=dist.get_rank(), world_size=dist.get_world_size())
    logging.basicConfig(level=logging.INFO if args.rank == 0 else logging.WARN, format="%(message)s")
    torch.manual_seed(args.seed)
    model = CLIP()
    torch.manual_seed(args.seed + args.rank)
    model = DDP(model)
    exclude = lambda n, p: p.ndim < 2 or "logit_scale" in n
    named = list(model.named_parameters())
    opt = torch.optim.AdamW([{"params": [p for n, p in named if exclude(n, p)], "weight_decay": 0.0},
                             {"params": [p for n, p in named if not exclude(n, p)], "weight_decay": args.wd}],
                            lr=args.lr, betas=(0.9, 0.98), eps=1e-6)
    train, val = Pairs(1024, 1), Pairs(128, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    total = len(loader) // args.accum_freq * args.epochs

    def sched(step):
        lr = args.lr * (step + 1) / args.warmup if step < args.warmup else \
            0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (total - args.warmup))) * args.lr
        for g in opt.param_groups:
            g["lr"] = lr

    loss_fn = ClipLoss(args.rank, args.world_size)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, loss_fn, opt, sched, epoch, args)
        if args.rank == 0:
            logging.info("eval %s", evaluate(model, val))
            os.makedirs("logs_clip", exist_ok=True)
            torch.save({"epoch": epoch + 1, "state_dict": unwrap(model).state_dict(), "optimizer": opt.state_dict()},
                       "logs_clip/epoch_latest.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
