import contextlib
import os
from argparse import Namespace
from collections import OrderedDict, defaultdict

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PAD, BOS, VOCAB = 0, 1, 40


class TranslationData:
    """Substitution-cipher toy language pair of uneven lengths."""

    def __init__(self, n, seed):
        rng = np.random.RandomState(seed)
        self.src = [rng.randint(4, VOCAB, size=rng.randint(3, 14)) for _ in range(n)]
        self.tgt = [((s - 4 + 3) % (VOCAB - 4)) + 4 for s in self.src]
        self.sizes = np.array([len(s) for s in self.src])

    def collate(self, ids):
        if len(ids) == 0:
            return None
        m = max(self.sizes[i] for i in ids)
        src = torch.full((len(ids), m), PAD)
        tgt = torch.full((len(ids), m), PAD)
        prev = torch.full((len(ids), m), PAD)
        for r, i in enumerate(ids):
            n = self.sizes[i]
            src[r, :n] = torch.from_numpy(self.src[i])
            tgt[r, :n] = torch.from_numpy(self.tgt[i].copy())
            prev[r, 0] = BOS
            prev[r, 1:n] = tgt[r, :n - 1]
        return {"net_input": {"src": src, "prev": prev}, "target": tgt, "ntokens": int(self.sizes[ids].sum())}


def batch_by_size(order, sizes, max_tokens):
    batches, cur, longest = [], [], 0
    for i in order:
        if cur and max(longest, sizes[i]) * (len(cur) + 1) > max_tokens:
            batches.append(cur)
            cur, longest = [], 0
        cur.append(int(i))
        longest = max(longest, sizes[i])
    if cur:
        batches.append(cur)
    return batches


class EpochBatchIterator:
    def __init__(self, data, max_tokens, rank, world, seed):
        self.data, self.rank, self.world, self.seed = data, rank, world, seed
        self.frozen = batch_by_size(np.argsort(data.sizes, kind="mergesort"), data.sizes, max_tokens)
        self.epoch = 0

    def next_epoch_itr(self, update_freq):
        self.epoch += 1
        batches = list(self.frozen)
        np.random.RandomState(self.seed + self.epoch).shuffle(batches)
        shard = batches[self.rank::self.world]
        n = -(-len(batches) // self.world)
        shard += [[] for _ in range(n - len(shard))]
        for i in range(0, n, update_freq):
            yield [self.data.collate(b) for b in shard[i:i + update_freq]]


class Model(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.pos = nn.Embedding(16, dim)
        nn.init.normal_(self.emb.weight, 0, dim ** -0.5)
        nn.init.normal_(self.pos.weight, 0, 1.0)
        self.scale = dim ** 0.5
        self.core = nn.Transformer(dim, 4, 1, 1, 128, dropout=0.0, batch_first=True)

    def forward(self, src, prev):
        s = self.scale * self.emb(src) + self.pos(torch.arange(src.shape[1]))
        t = self.scale * self.emb(prev) + self.pos(torch.arange(prev.shape[1]))
        mask = torch.triu(torch.full((t.shape[1], t.shape[1]), True), 1)
        h = self.core(s, t, tgt_mask=mask, src_key_padding_mask=src.eq(PAD), memory_key_padding_mask=src.eq(PAD))
        return F.linear(h, self.emb.weight)


def criterion(model, sample):
    out = model(**sample["net_input"])
    lp = F.log_softmax(out, -1)
    loss = F.nll_loss(lp.view(-1, VOCAB), sample["target"].view(-1), ignore_index=PAD, reduction="sum")
    ok = (out.argmax(-1).eq(sample["target"]) & sample["target"].ne(PAD)).sum().item()
    return loss, sample["ntokens"], {"loss": loss.item(), "ntokens": sample["ntokens"], "correct": ok}


class Trainer:
    def __init__(self, args, model):
        self.args = args
        self.world = dist.get_world_size()
        self.model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98))
        self.num_updates = 0
        self._dummy_batch = None

    def dummy(self, sample):
        if sample is None:
            return self._dummy_batch, True
        if self._dummy_batch is None:
            self._dummy_batch = sample
        return sample, False

    def lr(self):
        u = self.num_updates + 1
        return self.args.lr * min(u / self.args.warmup, (self.args.warmup / u) ** 0.5)

    def train_step(self, samples):
        self.model.train()
        self.optimizer.zero_grad()
        sample_size, logs = 0, defaultdict(float)
        for i, sample in enumerate(samples):
            sample, is_dummy = self.dummy(sample)
            ctx = self.model.no_sync() if i < len(samples) - 1 else contextlib.ExitStack()
            with ctx:
                loss, n, log = criterion(self.model, sample)
                if is_dummy:
                    loss = loss * 0.0
                loss.backward()
            if not is_dummy:
                sample_size += n
                for k, v in log.items():
                    logs[k] += v
        gathered = [None] * self.world
        dist.all_gather_object(gathered, (sample_size, dict(logs)))
        total = sum(s for s, _ in gathered)
        # DDP has divided by the number of workers, undo it and normalise by tokens
        for p in self.model.parameters():
            p.grad.mul_(self.world / total)
        gnorm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_norm)
        for g in self.optimizer.param_groups:
            g["lr"] = self.lr()
        self.optimizer.step()
        self.num_updates += 1
        agg = OrderedDict((k, sum(l.get(k, 0.0) for _, l in gathered)) for k in ("loss", "correct", "ntokens"))
        return agg, gnorm.item()

    @torch.no_grad()
    def valid(self, data, max_tokens):
        self.model.eval()
        mine = batch_by_size(np.argsort(data.sizes), data.sizes, max_tokens)[dist.get_rank()::self.world]
        tot = torch.zeros(2, dtype=torch.float64)
        for b in mine:
            _, n, log = criterion(self.model.module, data.collate(b))
            tot += torch.tensor([log["correct"], n], dtype=torch.float64)
        dist.all_reduce(tot)
        return (tot[0] / tot[1]).item()


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    trainer = Trainer(args, Model())
    train, val = TranslationData(1500, 5), TranslationData(160, 6)
    itr = EpochBatchIterator(train, args.max_tokens, rank, world, args.seed)
    best = -1.0
    for epoch in range(1, args.epochs + 1):
        tot = defaultdict(float)
        for samples in itr.next_epoch_itr(args.update_freq):
            agg, gnorm = trainer.train_step(samples)
            for k, v in agg.items():
                tot[k] += v
        acc = trainer.valid(val, args.max_tokens)
        if rank == 0:
            print(f"| epoch {epoch:03d} | loss {tot['loss'] / tot['ntokens']:.3f} | train_acc "
                  f"{tot['correct'] / tot['ntokens']:.3f} | valid_acc {acc:.3f} | gnorm {gnorm:.3f} | "
                  f"num_updates {trainer.num_updates}", flush=True)
        if acc > best:
            best = acc
            if rank == 0:
                torch.save({"model": trainer.model.module.state_dict(), "epoch": epoch, "best": best},
                           "checkpoint_best.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Namespace(seed=1, max_tokens=200, update_freq=2, lr=3e-3, warmup=20, clip_norm=1.0, epochs=10))
