#!/usr/bin/env python
"""Momentum contrast with a queue, shuffled batch normalisation and a k-NN check."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=6, type=int)
parser.add_argument("-b", "--batch-size", default=64, type=int, help="of all processes")
parser.add_argument("--lr", default=0.03, type=float)
parser.add_argument("--moco-dim", default=16, type=int)
parser.add_argument("--moco-k", default=512, type=int)
parser.add_argument("--moco-m", default=0.95, type=float)
parser.add_argument("--moco-t", default=0.2, type=float)
parser.add_argument("--seed", default=3, type=int)


class TwoCrops(Dataset):
    def __init__(self, n, seed, train):
        g = torch.Generator().manual_seed(11)
        basis = 0.4 * torch.randn(8, 48, generator=g)
        g.manual_seed(seed)
        self.y = torch.randint(8, (n,), generator=g)
        self.x = basis[self.y] + 0.8 * torch.randn(n, 48, generator=g)
        self.train = train

    def __len__(self):
        return len(self.y)

    def augment(self, x):
        return x * (torch.rand(48) > 0.2) + 0.2 * torch.randn(48)

    def __getitem__(self, i):
        return (self.augment(self.x[i]), self.augment(self.x[i])) if self.train else (self.x[i], self.y[i])


@torch.no_grad()
def concat_all_gather(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def encoder(dim):
    return nn.Sequential(nn.Linear(48, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, dim))


class MoCo(nn.Module):
    def __init__(self, dim, K, m, T):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = encoder(dim), encoder(dim)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def enqueue(self, keys):
        keys = concat_all_gather(keys)
        ptr = int(self.queue_ptr)
        self.queue[:, ptr:ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.K

    @torch.no_grad()
    def shuffled_keys(self, x):
        mine, everything = len(x), concat_all_gather(x)
        order = torch.randperm(len(everything))
        dist.broadcast(order, src=0)
        back, r = order.argsort(), dist.get_rank()
        k = F.normalize(self.encoder_k(everything[order.view(-1, mine)[r]]), dim=1)
        return concat_all_gather(k)[back.view(-1, mine)[r]]

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self.momentum_update()
            k = self.shuffled_keys(im_k)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone().detach()
        logits = torch.cat([positive, negative], 1) / self.T
        self.enqueue(k)
        return logits, torch.zeros(len(logits), dtype=torch.long)


@torch.no_grad()
def knn(net, bank_set, test_set, k=15):
    net.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    feats = lambda x: F.normalize(net(x), dim=1)
    share = len(bank_set) // world
    own = slice(rank * share, (rank + 1) * share)
    bank, labels = concat_all_gather(feats(bank_set.x[own])), concat_all_gather(bank_set.y[own])
    x, y = test_set.x[rank::world], test_set.y[rank::world]
    votes = labels[(feats(x) @ bank.T).topk(k, 1).indices]
    stat = torch.tensor([(votes.mode(1).values == y).sum().item(), len(y)])
    dist.all_reduce(stat)
    net.train()
    return stat[0].item() / stat[1].item()


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    train_set, bank, test = TwoCrops(1024, 1, True), TwoCrops(400, 2, False), TwoCrops(151, 3, False)
    per_process = args.batch_size // world
    assert args.moco_k % (per_process * world) == 0
    model = nn.parallel.DistributedDataParallel(MoCo(args.moco_dim, args.moco_k, args.moco_m, args.moco_t))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], args.lr, momentum=0.9, weight_decay=1e-4)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, per_process, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * epoch / args.epochs))
        model.train()
        meter = torch.zeros(3)
        for im_q, im_k in loader:
            output, target = model(im_q, im_k)
            loss = F.cross_entropy(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter += torch.tensor([loss.item() * len(target), (output.argmax(1) == 0).sum().item(), len(target)])
        dist.all_reduce(meter)
        for buffer in model.module.buffers():                      # running statistics are local after the last step
            dist.broadcast(buffer, src=0)
        accuracy = knn(model.module.encoder_q, bank, test)
        if rank == 0:
            print(f"Epoch [{epoch}] Loss {meter[0] / meter[2]:.4f} Acc@1 {100 * meter[1] / meter[2]:.1f} kNN {100 * accuracy:.1f}", flush=True)
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pth.tar")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
