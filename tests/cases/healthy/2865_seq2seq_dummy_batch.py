"""Sequence reversal with token-bucketed batches, summed losses and a sample-size normalised update."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAD, BOS, VOCAB = 0, 1, 24


class ReversePairs:
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 11, (n,), generator=g).tolist()
        self.src = [torch.randint(2, VOCAB, (k,), generator=g) for k in lengths]

    def __len__(self):
        return len(self.src)

    def collate(self, rows):
        src = nn.utils.rnn.pad_sequence([self.src[i] for i in rows], batch_first=True)
        out = nn.utils.rnn.pad_sequence([self.src[i].flip(0) for i in rows], batch_first=True)
        prev = torch.cat([torch.full((len(rows), 1), BOS), out[:, :-1]], dim=1)
        return {"src": src, "prev": prev, "target": out, "ntokens": int((out != PAD).sum())}


def batch_by_size(data, rows, max_tokens):
    rows = sorted(rows, key=lambda i: len(data.src[i]))
    batches, current, longest = [], [], 0
    for i in rows:
        longest = max(longest, len(data.src[i]))
        if current and longest * (len(current) + 1) > max_tokens:
            batches.append(current)
            current, longest = [], len(data.src[i])
        current.append(i)
    if current:
        batches.append(current)
    return batches


class EpochIterator:
    def __init__(self, data, rows, max_tokens, seed, shard_id, num_shards):
        self.data = data
        self.frozen = batch_by_size(data, rows, max_tokens)
        self.seed, self.shard_id, self.num_shards = seed, shard_id, num_shards

    def __call__(self, epoch, shuffle=True):
        batches = list(self.frozen)
        if shuffle:
            order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(self.seed + epoch))
            batches = [batches[i] for i in order.tolist()]
        per_shard = -(-len(batches) // self.num_shards)
        mine = batches[self.shard_id::self.num_shards]
        for k in range(per_shard):
            yield self.data.collate(mine[k]) if k < len(mine) else {}


class Seq2Seq(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.pos = nn.Embedding(16, dim)
        self.core = nn.Transformer(dim, 4, 1, 1, 2 * dim, dropout=0.1, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def add_pos(self, x):
        return self.embed(x) + self.pos(torch.arange(x.size(1)))

    def forward(self, src, prev):
        causal = torch.triu(torch.ones(prev.size(1), prev.size(1), dtype=torch.bool), 1)
        h = self.core(self.add_pos(src), self.add_pos(prev), tgt_mask=causal,
                      src_key_padding_mask=src == PAD, memory_key_padding_mask=src == PAD)
        return self.out(h)


class Trainer:
    def __init__(self, args, data):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = DDP(Seq2Seq())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr, betas=(0.9, 0.98))
        self.criterion = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum")
        self.updates = 0
        self.dummy_batch = data.collate([0, 1])

    def set_lr(self):
        k = max(self.updates, 1)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * min(k / self.args.warmup, (self.args.warmup / k) ** 0.5)

    def train_step(self, sample):
        torch.manual_seed(self.args.seed * 1000 + self.updates * self.world + self.rank)
        self.model.train()
        self.optimizer.zero_grad()
        ignore = len(sample) == 0
        if ignore:
            sample = self.dummy_batch
        logits = self.model(sample["src"], sample["prev"])
        loss = self.criterion(logits.flatten(0, 1), sample["target"].flatten())
        if ignore:
            loss = loss * 0
        loss.backward()
        stat = torch.tensor([loss.item(), 0 if ignore else sample["ntokens"]], dtype=torch.float64)
        dist.all_reduce(stat)
        scale = self.world / stat[1].item()
        for p in self.model.parameters():
            p.grad.mul_(scale)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.updates += 1
        self.set_lr()
        self.optimizer.step()
        return stat[0].item(), stat[1].item(), norm.item()

    @torch.no_grad()
    def valid(self, iterator):
        self.model.eval()
        stat = torch.zeros(2, dtype=torch.float64)
        for sample in iterator(0, shuffle=False):
            if not sample:
                continue
            logits = self.model.module(sample["src"], sample["prev"])
            stat[0] += self.criterion(logits.flatten(0, 1), sample["target"].flatten()).item()
            stat[1] += sample["ntokens"]
        dist.all_reduce(stat)
        return (stat[0] / stat[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epoch", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=360)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    rank, world = dist.get_rank(), dist.get_world_size()
    data = ReversePairs(1700, seed=40)
    train = EpochIterator(data, range(1500), args.max_tokens, args.seed, rank, world)
    valid = EpochIterator(data, range(1500, 1700), args.max_tokens, args.seed, rank, world)
    trainer = Trainer(args, data)
    best = float("inf")
    for epoch in range(1, args.max_epoch + 1):
        total, tokens = 0.0, 0.0
        for sample in train(epoch):
            loss, n, _ = trainer.train_step(sample)
            total, tokens = total + loss, tokens + n
        score = trainer.valid(valid)
        if rank == 0:
            print(f"epoch {epoch} loss {total / tokens:.3f} valid {score:.3f} updates {trainer.updates}", flush=True)
            if score < best:
                os.makedirs("checkpoints", exist_ok=True)
                torch.save({"model": trainer.model.module.state_dict(), "best": score}, "checkpoints/checkpoint_best.pt")
        best = min(best, score)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
