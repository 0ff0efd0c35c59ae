"""Copy-and-reverse translation with batches by number of tokens and one loss normaliser over all processes."""
import argparse
import contextlib
import itertools
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PAD, BOS, EOS, V = 0, 1, 2, 16


class PairDataset:
    def __init__(self, n, seed):
        r = np.random.default_rng(seed)
        self.src = [r.integers(3, V, r.integers(2, 9)).tolist() + [EOS] for _ in range(n)]
        self.sizes = np.array([len(s) for s in self.src])

    def collate(self, idx):
        src = [self.src[i] for i in idx]
        tgt = [s[:-1][::-1] + [EOS] for s in src]
        pad = lambda rows: torch.tensor([r + [PAD] * (max(map(len, rows)) - len(r)) for r in rows])
        return {"src": pad(src), "prev": pad([[BOS] + t[:-1] for t in tgt]), "target": pad(tgt),
                "ntokens": sum(map(len, tgt)), "nsentences": len(src)}


def batch_by_size(indices, sizes, max_tokens):
    batches, cur, longest = [], [], 0
    for i in indices:
        longest = max(longest, sizes[i])
        if cur and longest * (len(cur) + 1) > max_tokens:
            batches.append(cur)
            cur, longest = [], sizes[i]
        cur.append(i)
    return batches + [cur] if cur else batches


class EpochBatchIterator:
    def __init__(self, ds, max_tokens, seed, shard, num_shards):
        self.ds, self.seed, self.shard, self.num = ds, seed, shard, num_shards
        order = np.random.default_rng(seed).permutation(len(ds.sizes))
        order = order[np.argsort(ds.sizes[order], kind="mergesort")]
        self.batches = batch_by_size(order, ds.sizes, max_tokens)

    def next_epoch_itr(self, epoch, shuffle=True):
        b = list(self.batches)
        if shuffle:
            np.random.default_rng(self.seed + epoch).shuffle(b)
        shard = list(itertools.islice(b, self.shard, None, self.num))
        longest = -(-len(b) // self.num)
        shard += [[]] * (longest - len(shard))
        return (self.ds.collate(x) if len(x) else None for x in shard)


class Seq2Seq(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(V, d, padding_idx=PAD)
        self.pos = nn.Embedding(16, d)
        self.enc = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.mem = nn.Linear(2 * d, d)
        self.dec = nn.GRU(d, d, batch_first=True)
        self.q = nn.Linear(d, d)
        self.out = nn.Linear(2 * d, V)

    def forward(self, src, prev):
        mask = src == PAD
        e = self.mem(self.enc(self.emb(src) + self.pos(torch.arange(src.shape[1])))[0])
        lens = (~mask).sum(1, keepdim=True)
        back = (lens - 1 - torch.arange(prev.shape[1])[None]).clamp(0, 15)
        h = self.dec(self.emb(prev) + self.pos(back))[0]
        a = (self.q(h + self.pos(back)) @ e.transpose(1, 2)).masked_fill(mask[:, None], -1e4).softmax(-1) @ e
        return self.out(torch.cat([h, a], -1))


class Trainer:
    def __init__(self, args, model):
        self.args, self.raw = args, model
        self.model = nn.parallel.DistributedDataParallel(model)
        self.opt = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
        self.num_updates, self.dummy = 0, None
        self.world = dist.get_world_size()

    def criterion(self, model, s):
        lp = F.log_softmax(model(s["src"], s["prev"]), -1)
        nll = F.nll_loss(lp.flatten(0, 1), s["target"].flatten(), ignore_index=PAD, reduction="sum")
        smooth = -lp.sum(-1)[s["target"] != PAD].sum() / V
        return 0.9 * nll + 0.1 * smooth, nll.item()

    def train_step(self, samples):
        self.opt.zero_grad()
        log = torch.zeros(2, dtype=torch.float64)
        for i, s in enumerate(samples):
            ignore = s is None
            s = self.dummy if ignore else s
            ctx = self.model.no_sync() if i < len(samples) - 1 else contextlib.nullcontext()
            with ctx:
                loss, nll = self.criterion(self.model, s)
                (loss * 0 if ignore else loss).backward()
            if not ignore:
                log += torch.tensor([nll, s["ntokens"]], dtype=torch.float64)
        dist.all_reduce(log)
        for p in self.raw.parameters():
            p.grad.mul_(self.world / log[1].item())
        nn.utils.clip_grad_norm_(self.raw.parameters(), self.args.clip_norm)
        self.num_updates += 1
        w = self.args.warmup
        for g in self.opt.param_groups:
            g["lr"] = self.args.lr * min(self.num_updates / w, (w / self.num_updates) ** 0.5)
        self.opt.step()
        return log

    @torch.no_grad()
    def validate(self, itr):
        self.raw.eval()
        log = torch.zeros(3, dtype=torch.float64)
        for s in itr:
            if s is None:
                continue
            _, nll = self.criterion(self.raw, s)
            good = (self.raw(s["src"], s["prev"]).argmax(-1) == s["target"])[s["target"] != PAD].sum().item()
            log += torch.tensor([nll, s["ntokens"], good], dtype=torch.float64)
        self.raw.train()
        dist.all_reduce(log)
        return (log[0] / log[1]).item(), (log[2] / log[1]).item()


class Grouped:
    def __init__(self, it, size):
        self.it, self.size = iter(it), size

    def __iter__(self):
        while chunk := list(itertools.islice(self.it, self.size)):
            yield chunk


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-tokens", type=int, default=300)
    p.add_argument("--update-freq", type=int, default=2)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--warmup", type=int, default=20)
    p.add_argument("--clip-norm", type=float, default=1.0)
    p.add_argument("--max-epoch", type=int, default=9)
    p.add_argument("--save-dir", default="checkpoints")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    trainer = Trainer(args, Seq2Seq())
    train, valid = PairDataset(2001, 5), PairDataset(301, 6)
    trainer.dummy = train.collate([0])
    titr = EpochBatchIterator(train, args.max_tokens, 1, rank, world)
    vitr = EpochBatchIterator(valid, args.max_tokens, 1, rank, world)
    for epoch in range(1, args.max_epoch + 1):
        tot = torch.zeros(2, dtype=torch.float64)
        for samples in Grouped(titr.next_epoch_itr(epoch), args.update_freq):
            tot += trainer.train_step(samples)
        vl, va = trainer.validate(vitr.next_epoch_itr(0, shuffle=False))
        if rank == 0:
            print(f"| epoch {epoch:03d} | loss {tot[0] / tot[1]:.3f} | valid {vl:.3f} acc {va:.3f} | num_updates {trainer.num_updates}")
            os.makedirs(args.save_dir, exist_ok=True)
            torch.save({"model": trainer.raw.state_dict(), "opt": trainer.opt.state_dict(), "epoch": epoch},
                       f"{args.save_dir}/checkpoint_last.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
