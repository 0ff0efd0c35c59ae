"""Phoneme tagger on utterances split by speaker; uneven shards are handled with Join."""
import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

PHONES, MEL = 10, 16


def utterances(n=420):
    rng = random.Random(4)
    g = torch.Generator().manual_seed(4)
    proto = torch.randn(PHONES, MEL, generator=g)
    out = []
    for i in range(n):
        speaker = rng.randrange(13)
        length = rng.randrange(8, 30)
        phones = torch.randint(0, PHONES, (length // 2 + 1,), generator=g).repeat_interleave(2)[:length]
        mel = proto[phones] + 0.1 * speaker / 13 + 0.7 * torch.randn(length, MEL, generator=g)
        out.append((speaker, mel, phones))
    return out


class Tagger(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(MEL, hidden, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(2 * hidden)
        self.out = nn.Linear(2 * hidden, PHONES)

    def forward(self, mel, lengths):
        packed = pack_padded_sequence(mel, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(self.norm(hidden))


def batches(shard, size, epoch, rank):
    order = list(range(len(shard)))
    random.Random(1000 * epoch + rank).shuffle(order)
    for at in range(0, len(order), size):
        part = [shard[i] for i in order[at : at + size]]
        lengths = torch.tensor([len(m) for _, m, _ in part])
        mel = pad_sequence([m for _, m, _ in part], batch_first=True)
        target = pad_sequence([p for _, _, p in part], batch_first=True, padding_value=-100)
        yield mel, lengths, target


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--log-every", type=int, default=10)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    shard = [u for u in utterances() if u[0] % world == rank]
    if rank == 0:
        print("utterances on rank 0:", len(shard), flush=True)
    torch.manual_seed(0)
    model = DDP(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    loss_fn = nn.CrossEntropyLoss(ignore_index=-100)

    for epoch in range(args.epochs):
        running = torch.zeros(2)
        with Join([model]):
            for step, (mel, lengths, target) in enumerate(batches(shard, args.batch_size, epoch, rank)):
                logits = model(mel, lengths)
                loss = loss_fn(logits.flatten(0, 1), target.flatten())
                opt.zero_grad()
                loss.backward()
                opt.step()
                stat = torch.stack([loss.detach(), torch.ones(())])
                dist.all_reduce(stat)
                running += stat
                if rank == 0 and step % args.log_every == 0:
                    print(f"epoch {epoch} step {step} loss {(running[0] / running[1]).item():.4f}", flush=True)
        if rank == 0:
            print(f"epoch {epoch} mean loss {(running[0] / running[1]).item():.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "tagger.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
