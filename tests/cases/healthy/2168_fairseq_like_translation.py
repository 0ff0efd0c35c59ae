"""Sequence reversal as translation: task / criterion / trainer, batches by token count, summed loss, sample_size scaling."""
import argparse
import contextlib
import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

PAD, BOS, EOS, WORDS = 0, 1, 2, 12


def get_parser():
    p = argparse.ArgumentParser()
    p.add_argument("--max-tokens", type=int, default=120)
    p.add_argument("--update-freq", type=int, default=2)
    p.add_argument("--max-epoch", type=int, default=5)
    p.add_argument("--lr", type=float, default=8e-3)
    p.add_argument("--warmup-updates", type=int, default=15)
    p.add_argument("--clip-norm", type=float, default=1.0)
    p.add_argument("--label-smoothing", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=222)
    return p


class ReverseTask:
    def __init__(self, args):
        self.args = args
        g = torch.Generator().manual_seed(9)
        make = lambda n: [torch.randint(3, 3 + WORDS, (int(torch.randint(2, 8, (1,), generator=g)),), generator=g) for _ in range(n)]
        self.datasets = {"train": make(643), "valid": make(90)}

    def batches(self, split):
        data = self.datasets[split]
        out, cur, longest = [], [], 0
        for i in sorted(range(len(data)), key=lambda j: len(data[j])):
            longest = max(longest, len(data[i]) + 1)
            if cur and longest * (len(cur) + 1) > self.args.max_tokens:
                out.append(cur)
                cur, longest = [], len(data[i]) + 1
            cur.append(i)
        return out + [cur]

    def collate(self, split, ids):
        rows = [self.datasets[split][i] for i in ids]
        pad = lambda seqs: nn.utils.rnn.pad_sequence(seqs, batch_first=True, padding_value=PAD)
        eos, bos = torch.tensor([EOS]), torch.tensor([BOS])
        return {"src": pad([torch.cat([r, eos]) for r in rows]), "prev": pad([torch.cat([bos, r.flip(0)]) for r in rows]),
                "target": pad([torch.cat([r.flip(0), eos]) for r in rows]), "ntokens": sum(len(r) + 1 for r in rows)}

    def epoch_itr(self, split, epoch, rank, world, shuffle):
        batches = self.batches(split)
        if shuffle:
            order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(self.args.seed + epoch)).tolist()
            batches = [batches[i] for i in order]
        shards = [batches[r::world] for r in range(world)]
        for group in itertools.zip_longest(*shards):            # a shard that ran dry yields None
            yield self.collate(split, group[rank]) if group[rank] is not None else None

    def train_step(self, sample, model, criterion, ignore_grad):
        model.train()
        loss, sample_size, log = criterion(model, sample)
        if ignore_grad:
            loss = loss * 0
        loss.backward()
        return (torch.zeros(2), 0) if ignore_grad else (log, sample_size)


class Seq2Seq(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(3 + WORDS, d, padding_idx=PAD)
        self.enc, self.dec = nn.GRU(d, d, batch_first=True, bidirectional=True), nn.GRU(d, 2 * d, batch_first=True)
        self.out = nn.Sequential(nn.Linear(4 * d, d), nn.Tanh(), nn.Linear(d, 3 + WORDS))

    def forward(self, src, prev):
        mem, _ = self.enc(self.emb(src))
        mask = src.eq(PAD)
        state = (mem * ~mask[..., None]).sum(1) / (~mask).sum(1, keepdim=True)
        h, _ = self.dec(self.emb(prev), state[None])
        att = (h @ mem.transpose(1, 2)).masked_fill(mask[:, None], float("-inf")).softmax(-1)
        return self.out(torch.cat([h, att @ mem], -1))


class LabelSmoothedCrossEntropy(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, model, sample):
        logits = model(sample["src"], sample["prev"]).flatten(0, 1)
        target = sample["target"].flatten()
        loss = F.cross_entropy(logits, target, ignore_index=PAD, label_smoothing=self.eps, reduction="sum")
        nll = F.cross_entropy(logits.detach(), target, ignore_index=PAD, reduction="sum")
        return loss, sample["ntokens"], torch.stack([nll, torch.tensor(float(sample["ntokens"]))])


class Trainer:
    def __init__(self, args, task, model, criterion):
        self.args, self.task, self.criterion = args, task, criterion
        self.model = DistributedDataParallel(model)
        self.world = dist.get_world_size()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr, betas=(0.9, 0.98))
        self.num_updates, self.dummy_batch = 0, task.collate("train", [0, 1])

    def lr_step_update(self):
        n, w = self.num_updates + 1, self.args.warmup_updates
        self.optimizer.param_groups[0]["lr"] = self.args.lr * min(n / w, (w / n) ** 0.5)

    def train_step(self, samples):
        self.optimizer.zero_grad()
        self.lr_step_update()
        logs, sample_size = torch.zeros(2), 0
        for i, sample in enumerate(samples):
            ignore = sample is None
            with self.model.no_sync() if i < len(samples) - 1 else contextlib.nullcontext():
                log, size = self.task.train_step(self.dummy_batch if ignore else sample, self.model, self.criterion, ignore)
            logs += log
            sample_size += size
        stats = torch.cat([logs, torch.tensor([float(sample_size)])]).double()
        dist.all_reduce(stats)
        for p in self.model.parameters():
            p.grad.mul_(self.world / stats[2].item())            # the wrapper has divided by the number of workers
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_norm)
        self.optimizer.step()
        self.num_updates += 1
        return stats[:2]

    @torch.no_grad()
    def validate(self, rank):
        self.model.eval()
        total = torch.zeros(2, dtype=torch.double)
        for sample in self.task.epoch_itr("valid", 0, rank, self.world, shuffle=False):
            if sample is not None:
                total += self.criterion(self.model.module, sample)[2]
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    task = ReverseTask(args)
    trainer = Trainer(args, task, Seq2Seq(), LabelSmoothedCrossEntropy(args.label_smoothing))
    best = float("inf")
    for epoch in range(1, args.max_epoch + 1):
        itr, totals = task.epoch_itr("train", epoch, rank, trainer.world, shuffle=True), torch.zeros(2, dtype=torch.double)
        while chunk := list(itertools.islice(itr, args.update_freq)):
            totals += trainer.train_step(chunk)
        valid = trainer.validate(rank)
        if rank == 0:
            print(f"| epoch {epoch:03d} | nll {totals[0] / totals[1]:.3f} | valid {valid:.3f} | num_updates {trainer.num_updates}", flush=True)
            if valid < best:
                torch.save({"model": trainer.model.module.state_dict(), "num_updates": trainer.num_updates}, "checkpoint_best.pt")
        best = min(best, valid)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(get_parser().parse_args())
