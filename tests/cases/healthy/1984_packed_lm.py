"""Language model on packed documents: block-diagonal attention, activation checkpointing, exact token-weighted loss.

Rows hold different numbers of real targets, so a mean of per-process means would be wrong. The loss of a step is the sum
over all targets of all micro-batches of all processes, divided by their number.
"""
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

VOCAB, ROW, DIM, HEADS, DEPTH = 28, 64, 48, 4, 3
MICRO_BATCH, ACCUMULATE, EPOCHS, PEAK_LR, WARMUP = 6, 2, 4, 8e-3, 8
BOS, IGNORE = 0, -100


def documents(n, seed):
    """Arithmetic-like strings: a start, a stride, then the progression modulo 27, with one symbol in twenty garbled."""
    g = torch.Generator().manual_seed(seed)
    docs = []
    for _ in range(n):
        length = int(torch.randint(6, 40, (1,), generator=g))
        start, stride = torch.randint(1, VOCAB, (2,), generator=g).tolist()
        body = (start - 1 + (1 + stride % 4) * torch.arange(length)) % (VOCAB - 1) + 1
        garbled = torch.rand(length, generator=g) < 0.05
        body[garbled] = torch.randint(1, VOCAB, (int(garbled.sum()),), generator=g)
        docs.append(torch.cat([torch.tensor([BOS]), body]))
    return docs


def pack(docs):
    """Greedy packing into rows of ROW tokens. Returns ids, labels, segment and position, each [rows, ROW]."""
    rows, current, room = [], [], ROW
    for doc in docs:
        if len(doc) > room:
            rows.append(current)
            current, room = [], ROW
        current.append(doc)
        room -= len(doc)
    if current:
        rows.append(current)
    shape = (len(rows), ROW)
    ids, labels = torch.full(shape, BOS), torch.full(shape, IGNORE)
    segment, position = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)
    for r, row in enumerate(rows):
        at = 0
        for s, doc in enumerate(row):
            end = at + len(doc)
            ids[r, at:end] = doc
            labels[r, at:end - 1] = doc[1:]  # the last token of a document predicts nothing
            segment[r, at:end] = s
            position[r, at:end] = torch.arange(len(doc))
            at = end
    return torch.stack([ids, labels, segment, position], dim=1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.ff = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Dropout(0.05))

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.ff(self.norm2(x))


class PackedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(ROW, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, batch):
        """Sum of the token losses, not their mean."""
        ids, labels, segment, position = batch.unbind(1)
        same = segment.unsqueeze(2) == segment.unsqueeze(1)
        mask = (same & torch.ones(ROW, ROW, dtype=torch.bool).tril()).unsqueeze(1)
        x = self.token(ids) + self.position(position)
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def targets_in(batch):
    return (batch[:, 1] != IGNORE).sum()


def step_batches(rows, epoch, rank, world):
    """Lists of ACCUMULATE micro-batches for this process; the same number of lists on every process."""
    per_step = MICRO_BATCH * ACCUMULATE * world
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(100 + epoch))
    for start in range(0, len(rows) - per_step + 1, per_step):
        mine = order[start:start + per_step][rank::world]
        yield [rows[idx] for idx in mine.split(MICRO_BATCH)]


@torch.no_grad()
def perplexity(model, rows, rank, world):
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in rows[rank::world].split(16):
        sums += torch.stack([model(batch).double(), targets_in(batch).double()])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).exp().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = pack(documents(800, seed=1)), pack(documents(120, seed=2))
    torch.manual_seed(0)
    ddp = DDP(PackedLM())
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / WARMUP))
    if rank == 0:
        fill = (train[:, 2] >= 0).float().mean()
        print(f"{len(train)} rows, {100 * fill:.1f}% filled", flush=True)

    step = 0
    for epoch in range(EPOCHS):
        epoch_sums = torch.zeros(2, dtype=torch.float64)
        for micro_batches in step_batches(train, epoch, rank, world):
            # How many targets the whole step has must be known before its first backward.
            tokens = torch.stack([targets_in(b) for b in micro_batches]).sum()
            dist.all_reduce(tokens)
            # DDP divides by `world`, which the factor takes back: the gradient is that of sum / tokens.
            scale = world / tokens.item()
            loss_sum = torch.zeros((), dtype=torch.float64)
            for i, batch in enumerate(micro_batches):
                with ddp.no_sync() if i + 1 < len(micro_batches) else nullcontext():
                    loss = ddp(batch)
                    (loss * scale).backward()
                loss_sum += loss.detach()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            local_tokens = sum(int(targets_in(b)) for b in micro_batches)
            epoch_sums += torch.stack([loss_sum, torch.tensor(float(local_tokens), dtype=torch.float64)])
        dist.all_reduce(epoch_sums)
        ppl = perplexity(ddp.module, valid, rank, world)
        if rank == 0:
            print(f"epoch {epoch} step {step} train loss/token {(epoch_sums[0] / epoch_sums[1]).item():.4f} "
                  f"valid perplexity {ppl:.3f}", flush=True)

    if rank == 0:
        torch.save(ddp.module.state_dict(), "packed_lm.pt.tmp")
        os.replace("packed_lm.pt.tmp", "packed_lm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
