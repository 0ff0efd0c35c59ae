"""Sentence pairs: do both halves have the same topic? Runs with one process or several."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=42)
    return ap.parse_args()


class Pairs(Dataset):
    def __init__(self, n=640):
        g = torch.Generator().manual_seed(77)
        topics = torch.randint(0, 5, (n, 2), generator=g)
        same = torch.rand(n, generator=g) < 0.5
        topics[same, 1] = topics[same, 0]
        words = torch.randint(0, 12, (n, 2, 7), generator=g) + 12 * topics.unsqueeze(2)
        self.words, self.same = words, (topics[:, 0] == topics[:, 1]).float()

    def __len__(self):
        return len(self.same)

    def __getitem__(self, i):
        return self.words[i], self.same[i]


class PairNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(60, 16)
        self.judge = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, words):
        u, v = self.bag(words[:, 0]), self.bag(words[:, 1])
        return self.judge(torch.cat([u * v, (u - v).abs()], 1)).squeeze(1)


def train(args, model, data):
    distributed = args.local_rank != -1
    sampler = DistributedSampler(data) if distributed else RandomSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * len(loader))
    for epoch in range(args.epochs):
        if distributed:
            sampler.set_epoch(epoch)
        sums = torch.zeros(3)
        for words, same in loader:
            logit = model(words)
            loss = nn.functional.binary_cross_entropy_with_logits(logit, same)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            sums += torch.tensor([loss.item() * len(same), ((logit > 0) == (same > 0)).sum().item(), len(same)])
        if distributed:
            dist.all_reduce(sums)
        if args.local_rank in (-1, 0):
            print(f"epoch {epoch}: {int(sums[2])} pairs, loss {sums[0] / sums[2]:.4f}, accuracy {sums[1] / sums[2]:.3f}", flush=True)


def main():
    args = parse()
    if args.local_rank != -1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    net = PairNet()
    model = DDP(net) if args.local_rank != -1 else net
    train(args, model, Pairs())
    if args.local_rank in (-1, 0):
        torch.save(net.state_dict(), "pairs.pt")
    if args.local_rank != -1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
