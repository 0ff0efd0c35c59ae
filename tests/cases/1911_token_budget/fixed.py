"""Text classification; batches are packed up to a token budget instead of a fixed number of sentences."""
import argparse
import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence


def sentences(n, vocab, seed):
    rng = random.Random(seed)
    data = []
    for _ in range(n):
        topic = rng.randrange(3)
        size = min(60, 4 + int(rng.expovariate(1 / 12)))
        words = [rng.randrange(1, vocab) if rng.random() < 0.6 else 1 + topic * 7 + rng.randrange(7) for _ in range(size)]
        data.append((torch.tensor(words), topic))
    return data


def pack(indices, lengths, budget):
    """Groups indices so that no group, padded to its longest sentence, holds more tokens than the budget."""
    batches, current, longest = [], [], 0
    for i in indices:
        longest = max(longest, lengths[i])
        if current and longest * (len(current) + 1) > budget:
            batches.append(current)
            current, longest = [], lengths[i]
        current.append(i)
    batches.append(current)
    return batches


class TokenBudgetSampler:
    def __init__(self, lengths, budget, rank, world, seed):
        self.lengths, self.budget, self.rank, self.world, self.seed = lengths, budget, rank, world, seed

    def batches(self, epoch):
        rng = random.Random(self.seed * 1000 + epoch)
        order = list(range(len(self.lengths)))
        rng.shuffle(order)
        batches = pack(order, self.lengths, self.budget)
        return batches[: len(batches) // self.world * self.world][self.rank :: self.world]


class Classifier(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, 32, padding_idx=0)
        self.out = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, tokens):
        mask = (tokens > 0).unsqueeze(-1)
        return self.out((self.embed(tokens) * mask).sum(1) / mask.sum(1))


def worker(rank, args, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.procs)
    torch.manual_seed(args.seed)
    data = sentences(args.sentences, args.vocab, seed=1)
    sampler = TokenBudgetSampler([len(w) for w, _ in data], args.budget, rank, args.procs, args.seed)
    model = DDP(Classifier(args.vocab))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        stats = torch.zeros(3)
        for batch in sampler.batches(epoch):
            tokens = pad_sequence([data[i][0] for i in batch], batch_first=True)
            topic = torch.tensor([data[i][1] for i in batch])
            logits = model(tokens)
            # each sentence weighs the same, whatever the batch it ended up in
            share = torch.tensor(float(len(batch)))
            dist.all_reduce(share)
            loss = nn.functional.cross_entropy(logits, topic, reduction="sum") * args.procs / share
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits = (logits.argmax(1) == topic).sum().item()
            stats += torch.tensor([loss.item(), hits, len(batch)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} accuracy {stats[1] / stats[2]:.3f} on {int(stats[2])} sentences", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--procs", type=int, default=2)
    ap.add_argument("--sentences", type=int, default=700)
    ap.add_argument("--vocab", type=int, default=120)
    ap.add_argument("--budget", type=int, default=320)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        mp.spawn(worker, args=(args, f"{os.path.abspath(folder)}/store"), nprocs=args.procs)


if __name__ == "__main__":
    main()
