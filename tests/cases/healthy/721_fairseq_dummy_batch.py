"""fairseq's way with uneven shards: a rank without data runs a dummy batch whose loss is multiplied by zero; gradients are scaled by world / sample_size."""
import argparse
import logging
import math
import os
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GroupedShards:
    """Batches of about max_tokens tokens; ShardedIterator fills the last rank with None."""

    def __init__(self, n, max_tokens, seed):
        g = torch.Generator().manual_seed(seed)
        lens = torch.randint(3, 12, (n,), generator=g)
        self.data = [torch.randint(1, 3, (int(l),), generator=g).cumsum(0) % 12 + 1 for l in lens]
        order = sorted(range(n), key=lambda i: len(self.data[i]))
        self.batches, cur = [], []
        for i in order:
            if cur and (len(cur) + 1) * len(self.data[i]) > max_tokens:
                self.batches.append(cur)
                cur = []
            cur.append(i)
        self.batches.append(cur)

    def collate(self, ids):
        return nn.utils.rnn.pad_sequence([self.data[i] for i in ids], batch_first=True)

    def next_epoch_itr(self, epoch, num_shards, shard_id):
        g = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(self.batches), generator=g).tolist()
        n = math.ceil(len(order) / num_shards)
        order += [None] * (n * num_shards - len(order))
        for j in range(shard_id, n * num_shards, num_shards):
            yield None if order[j] is None else self.collate(self.batches[order[j]])


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(13, 32, padding_idx=0)
        self.rnn = nn.LSTM(32, 48, batch_first=True)
        self.out = nn.Linear(48, 13)

    def forward(self, tokens):
        return self.out(self.rnn(self.emb(tokens))[0])


def criterion(model, sample):
    logits = model(sample[:, :-1])
    target = sample[:, 1:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
    ntokens = int((target != 0).sum())
    return loss, ntokens, {"loss": loss.item(), "ntokens": ntokens}


class Trainer:
    def __init__(self, args, model, dummy_batch):
        self.args, self.dummy_batch = args, dummy_batch
        self.world = dist.get_world_size()
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr, betas=(0.9, 0.98))
        self.num_updates = 0

    def train_step(self, samples):
        self.model.train()
        self.optimizer.zero_grad()
        logging_output, sample_size = {"loss": 0.0, "ntokens": 0}, 0
        for i, sample in enumerate(samples):
            ignore = sample is None
            if ignore:
                sample = self.dummy_batch

            def maybe_no_sync():
                return self.model.no_sync() if i < len(samples) - 1 else _Null()

            with maybe_no_sync():
                loss, n, log = criterion(self.model, sample)
                if ignore:
                    loss = loss * 0
                loss.backward()
            if not ignore:
                sample_size += n
                for k in log:
                    logging_output[k] += log[k]
        stats = torch.tensor([float(sample_size), logging_output["loss"], logging_output["ntokens"]], dtype=torch.double)
        dist.all_reduce(stats)
        total = stats[0].item()
        for p in chain.from_iterable(g["params"] for g in self.optimizer.param_groups):
            p.grad.mul_(self.world / total)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_norm)
        if not torch.isfinite(grad_norm):
            raise FloatingPointError("gradients are Nan/Inf")
        self.num_updates += 1
        self.lr_step_update()
        self.optimizer.step()
        return {"loss": stats[1].item() / stats[2].item() / math.log(2), "gnorm": grad_norm.item()}

    def lr_step_update(self):
        w = self.args.warmup_updates
        lr = self.args.lr * min(self.num_updates / w, (w / self.num_updates) ** 0.5)
        for g in self.optimizer.param_groups:
            g["lr"] = lr


class _Null:
    def __enter__(self):
        return None

    def __exit__(self, *a):
        return False


def grouped(it, size):
    chunk = []
    for x in it:
        chunk.append(x)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-epoch", type=int, default=4)
    p.add_argument("--update-freq", type=int, default=2)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--warmup-updates", type=int, default=8)
    p.add_argument("--clip-norm", type=float, default=1.0)
    args = p.parse_args()
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.ERROR, format="%(levelname)s | %(message)s")
    torch.manual_seed(1)
    data = GroupedShards(230, 60, 3)
    trainer = Trainer(args, LM(), data.collate(data.batches[0]))
    for epoch in range(1, args.max_epoch + 1):
        itr = data.next_epoch_itr(epoch, dist.get_world_size(), dist.get_rank())
        for samples in grouped(itr, args.update_freq):
            log = trainer.train_step(samples)
        logging.info("epoch %03d | loss %.3f | gnorm %.3f | num_updates %d", epoch, log["loss"], log["gnorm"], trainer.num_updates)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
