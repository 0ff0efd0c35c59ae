"""Sequence tagging with padding: accumulated gradients are weighted by the tokens of all processes."""
import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

PAD = -100


def sentences(count, seed):
    """A token is tagged 1 if it is larger than the one before."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        ids = torch.randint(1, 40, (int(torch.randint(4, 28, (), generator=g)),), generator=g)
        tags = torch.cat([torch.zeros(1, dtype=torch.long), (ids[1:] > ids[:-1]).long()])
        out.append((ids, tags))
    return out


def collate(batch):
    ids = pad_sequence([b[0] for b in batch], batch_first=True)
    return ids, pad_sequence([b[1] for b in batch], batch_first=True, padding_value=PAD)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 32, padding_idx=0)
        self.conv = nn.Conv1d(32, 64, 3, padding=1)
        self.out = nn.Linear(64, 2)

    def forward(self, ids):
        return self.out(torch.relu(self.conv(self.emb(ids).transpose(1, 2))).transpose(1, 2))


def plan(data, epoch, rank, world, batch, accum):
    """Groups of `accum` micro-batches, equally many on all processes."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
    order = order[: len(order) // (batch * accum * world) * batch * accum * world][rank::world]
    micro = [collate([data[i] for i in order[k : k + batch]]) for k in range(0, len(order), batch)]
    return [micro[k : k + accum] for k in range(0, len(micro), accum)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--accum", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = sentences(800, seed=3)
    model = DDP(Tagger())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(args.epochs):
        seen = torch.zeros(2, dtype=torch.float64)
        for group in plan(data, epoch, rank, world, args.batch, args.accum):
            tokens = torch.tensor(float(sum((tags != PAD).sum() for _, tags in group)))
            mine = tokens.item()
            dist.all_reduce(tokens)
            opt.zero_grad()
            summed = 0.0
            for i, (ids, tags) in enumerate(group):
                with model.no_sync() if i + 1 < len(group) else nullcontext():
                    logits = model(ids)
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=PAD, reduction="sum")
                    # DDP divides by the number of processes, the mean is over the tokens of all of them
                    (loss * world / tokens).backward()
                summed += loss.item()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            seen += torch.tensor([summed, mine])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: loss per token {(seen[0] / seen[1]).item():.4f}, last norm {norm:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "tagger.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
