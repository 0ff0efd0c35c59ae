"""Sequence to sequence training with token batches, update_freq and sample-size normalisation."""
import argparse
import itertools
import logging
import math
import os
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("fairseq_like")
PAD, BOS, EOS = 0, 1, 2


class ReversalTask:
    def __init__(self, args):
        self.args, self.vocab, self.datasets = args, 24, {}

    def load_dataset(self, split, n, seed):
        rng = np.random.default_rng(seed)
        self.datasets[split] = [rng.integers(3, self.vocab, size=rng.integers(3, 12)) for _ in range(n)]

    def collate(self, rows):
        if len(rows) == 0:
            return {}
        t = max(map(len, rows)) + 1
        src, tgt, prev = (torch.full((len(rows), t), PAD) for _ in range(3))
        for i, r in enumerate(rows):
            s, rev = torch.from_numpy(r), torch.from_numpy(r[::-1].copy())
            n = len(r)
            src[i, :n], src[i, n] = s, EOS
            tgt[i, :n], tgt[i, n] = rev, EOS
            prev[i, 0], prev[i, 1:n + 1] = BOS, rev
        return {"src": src, "prev": prev, "target": tgt, "ntokens": int((tgt != PAD).sum()), "nsentences": len(rows)}

    def batches(self, split, epoch, shuffle):
        data = self.datasets[split]
        rng = np.random.default_rng((self.args.seed, epoch))
        order = rng.permutation(len(data)) if shuffle else np.arange(len(data))
        order = sorted(order, key=lambda i: len(data[i]))
        out, cur, longest = [], [], 0
        for i in order:
            longest = max(longest, len(data[i]) + 1)
            if cur and longest * (len(cur) + 1) > self.args.max_tokens:
                out.append(cur)
                cur, longest = [], len(data[i]) + 1
            cur.append(i)
        out.append(cur)
        if shuffle:
            rng.shuffle(out)
        return out

    def get_itr(self, split, epoch, rank, world, shuffle):
        """Every shard has the same length, what is missing is filled up with empty batches."""
        frozen = self.batches(split, epoch, shuffle)
        mine = frozen[rank::world]
        mine += [[]] * (math.ceil(len(frozen) / world) - len(mine))
        return [self.collate([self.datasets[split][i] for i in b]) for b in mine]


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d=48):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, d, padding_idx=PAD), nn.Embedding(16, d)
        self.transformer = nn.Transformer(d, 4, 1, 2, 2 * d, dropout=0.05, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, src, prev):
        add = lambda x: self.embed(x) * 2 + self.pos(torch.arange(x.size(1)))
        causal = torch.ones(prev.size(1), prev.size(1), dtype=torch.bool).triu(1)
        h = self.transformer(add(src), add(prev), tgt_mask=causal, src_key_padding_mask=src == PAD,
                             tgt_key_padding_mask=prev == PAD, memory_key_padding_mask=src == PAD)
        return self.out(h)


class LabelSmoothedCrossEntropy:
    def __init__(self, eps):
        self.eps = eps

    def __call__(self, model, sample):
        logp = F.log_softmax(model(sample["src"], sample["prev"]), -1)
        keep = sample["target"] != PAD
        nll = -logp.gather(-1, sample["target"][..., None])[..., 0][keep].sum()
        smooth = -logp.mean(-1)[keep].sum()
        hits = (logp.argmax(-1) == sample["target"])[keep].sum()
        return (1 - self.eps) * nll + self.eps * smooth, sample["ntokens"], [nll.item(), hits.item(), sample["ntokens"]]


class Trainer:
    def __init__(self, args, task, model, criterion):
        self.args, self.task, self.criterion = args, task, criterion
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-8)
        self.num_updates, self._dummy = 0, None

    def lr_step(self):
        w, n = self.args.warmup_updates, self.num_updates + 1
        lr = self.args.lr * (n / w if n < w else math.sqrt(w / n))
        for g in self.optimizer.param_groups:
            g["lr"] = lr
        return lr

    def _prepare(self, sample):
        if len(sample) == 0:
            return self._dummy, True
        if self._dummy is None:
            self._dummy = sample
        return sample, False

    def begin_epoch(self, itr):
        self._dummy = next(s for s in itr if len(s))

    def train_step(self, samples):
        torch.manual_seed(self.args.seed + self.num_updates * self.world + self.rank)
        self.model.train()
        self.optimizer.zero_grad()
        logs, sample_size = torch.zeros(3, dtype=torch.float64), 0
        for i, sample in enumerate(samples):
            sample, ignore_grad = self._prepare(sample)
            with self.model.no_sync() if i < len(samples) - 1 else nullcontext():
                loss, size, log = self.criterion(self.model, sample)
                if ignore_grad:
                    loss, size, log = loss * 0, 0, [0.0, 0.0, 0.0]
                loss.backward()
            sample_size += size
            logs += torch.tensor(log, dtype=torch.float64)
        stats = torch.cat([logs, torch.tensor([float(sample_size)], dtype=torch.float64)])
        dist.all_reduce(stats)
        # DDP has averaged over processes and the loss is a sum over tokens
        for p in self.model.parameters():
            p.grad.mul_(self.world / stats[3].item())
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_norm)
        lr = self.lr_step()
        self.optimizer.step()
        self.num_updates += 1
        return stats, lr

    @torch.no_grad()
    def valid_epoch(self, itr):
        self.model.eval()
        logs = torch.zeros(3, dtype=torch.float64)
        for sample in itr:
            if len(sample):
                logs += torch.tensor(self.criterion(self.model.module, sample)[2], dtype=torch.float64)
        dist.all_reduce(logs)
        return (logs[0] / logs[2]).item() / math.log(2), (logs[1] / logs[2]).item()

    def save_checkpoint(self, name, epoch, extra):
        if self.rank == 0:
            os.makedirs(self.args.save_dir, exist_ok=True)
            torch.save({"model": self.model.module.state_dict(), "last_optimizer_state": self.optimizer.state_dict(),
                        "optimizer_history": [{"num_updates": self.num_updates}], "epoch": epoch, "extra_state": extra},
                       os.path.join(self.args.save_dir, name))


def grouped(itr, n):
    it = iter(itr)
    while chunk := list(itertools.islice(it, n)):
        yield chunk


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-tokens", type=int, default=220)
    p.add_argument("--update-freq", type=int, default=2)
    p.add_argument("--max-epoch", type=int, default=6)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--warmup-updates", type=int, default=20)
    p.add_argument("--clip-norm", type=float, default=1.0)
    p.add_argument("--label-smoothing", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--log-interval", type=int, default=12)
    p.add_argument("--save-dir", default="checkpoints")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(format="%(name)s | %(message)s", level=logging.INFO if rank == 0 else logging.WARNING)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    task = ReversalTask(args)
    task.load_dataset("train", 1400, 1)
    task.load_dataset("valid", 150, 2)
    trainer = Trainer(args, task, Seq2Seq(task.vocab), LabelSmoothedCrossEntropy(args.label_smoothing))
    valid_itr = task.get_itr("valid", 0, rank, world, shuffle=False)
    best = None
    for epoch in range(1, args.max_epoch + 1):
        itr = task.get_itr("train", epoch, rank, world, shuffle=True)
        trainer.begin_epoch(itr)
        for samples in grouped(itr, args.update_freq):
            stats, lr = trainer.train_step(samples)
            if trainer.num_updates % args.log_interval == 0:
                logger.info("epoch %03d: num_updates %d | nll %.3f | wpb %d | lr %.2e", epoch, trainer.num_updates,
                            (stats[0] / stats[2]).item() / math.log(2), int(stats[3]), lr)
        nll, acc = trainer.valid_epoch(valid_itr)
        logger.info("epoch %03d | valid | nll_loss %.3f | ppl %.2f | token acc %.3f", epoch, nll, 2 ** nll, acc)
        trainer.save_checkpoint("checkpoint_last.pt", epoch, {"val_nll": nll})
        if best is None or nll < best:
            best = nll
            trainer.save_checkpoint("checkpoint_best.pt", epoch, {"val_nll": nll})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
