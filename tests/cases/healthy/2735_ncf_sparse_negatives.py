import argparse
import math
import os
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

USERS, ITEMS = 400, 300


def parse_args():
    p = argparse.ArgumentParser(description="neural collaborative filtering")
    p.add_argument("-e", "--epochs", type=int, default=8)
    p.add_argument("-b", "--batch_size", type=int, default=2048)
    p.add_argument("-f", "--factors", type=int, default=16)
    p.add_argument("-n", "--negative_samples", type=int, default=4)
    p.add_argument("-k", "--topk", type=int, default=10)
    p.add_argument("-l", "--learning_rate", type=float, default=0.01)
    p.add_argument("--seed", "-s", type=int, default=1)
    p.add_argument("--threshold", "-t", type=float, default=0.9)
    p.add_argument("--checkpoint_dir", default="ckpt")
    return p.parse_args()


def synth():
    g = torch.Generator().manual_seed(99)
    u, v = torch.randn(USERS, 4, generator=g), torch.randn(ITEMS, 4, generator=g)
    score = u @ v.T + 0.5 * torch.randn(USERS, ITEMS, generator=g)
    top = score.topk(13, dim=1).indices
    perm = torch.stack([torch.randperm(13, generator=g) for _ in range(USERS)])
    top = top.gather(1, perm)
    test_pos = top[:, 0]
    train = torch.stack([torch.arange(USERS).repeat_interleave(12), top[:, 1:].reshape(-1)], 1)
    neg = torch.randint(0, ITEMS, (USERS, 99), generator=g)
    clash = (neg[:, :, None] == top[:, None, :]).any(-1)
    return train, test_pos, neg, clash


class TrainIterator:
    """Every process keeps its own slice of the positives and draws its own negatives anew each epoch."""

    def __init__(self, pairs, batch, n_neg, rank, world):
        n = len(pairs) // world
        self.pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(4))][rank * n:(rank + 1) * n]
        self.batch, self.n_neg = batch // world, n_neg

    def epoch(self):
        users = self.pairs[:, 0].repeat(1 + self.n_neg)
        neg_items = torch.randint(0, ITEMS, (len(self.pairs) * self.n_neg,))
        items = torch.cat([self.pairs[:, 1], neg_items])
        labels = torch.zeros(len(items))
        labels[:len(self.pairs)] = 1.0
        order = torch.randperm(len(items))
        for ix in order.split(self.batch):
            if len(ix) == self.batch:
                yield users[ix], items[ix], labels[ix]


class NeuMF(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.mf_user, self.mf_item = nn.Embedding(USERS, f, sparse=True), nn.Embedding(ITEMS, f, sparse=True)
        self.mlp_user, self.mlp_item = nn.Embedding(USERS, 2 * f, sparse=True), nn.Embedding(ITEMS, 2 * f, sparse=True)
        for e in (self.mf_user, self.mf_item, self.mlp_user, self.mlp_item):
            nn.init.normal_(e.weight, 0.0, 0.1)
        self.mlp = nn.Sequential(nn.Linear(4 * f, 2 * f), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * f, f), nn.ReLU())
        self.final = nn.Linear(2 * f, 1)

    def forward(self, user, item, sigmoid=False):
        mf = self.mf_user(user) * self.mf_item(item)
        h = self.mlp(torch.cat([self.mlp_user(user), self.mlp_item(item)], 1))
        out = self.final(torch.cat([mf, h], 1)).squeeze(-1)
        return torch.sigmoid(out) if sigmoid else out


@torch.no_grad()
def val_epoch(model, test_pos, neg, clash, k, rank, world):
    model.eval()
    hits = torch.zeros(1)
    ndcg = torch.zeros(1)
    users = torch.arange(USERS)[rank::world]
    for u in users.split(50):
        cand = torch.cat([neg[u], test_pos[u][:, None]], 1)
        p = model(u[:, None].expand_as(cand).reshape(-1), cand.reshape(-1), sigmoid=True).view(cand.shape)
        p[:, :-1][clash[u]] = -1.0
        top = p.topk(k, dim=1).indices
        ifzero = (top == cand.shape[1] - 1).nonzero()
        hits += len(ifzero)
        ndcg += (math.log(2.0) / torch.log(ifzero[:, 1].float() + 2)).sum()
    dist.all_reduce(hits)
    dist.all_reduce(ndcg)
    model.train()
    return hits.item() / USERS, ndcg.item() / USERS


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train, test_pos, neg, clash = synth()
    model = NeuMF(args.factors)
    criterion = nn.BCEWithLogitsLoss(reduction="none")
    ddp = DDP(model)
    torch.manual_seed(args.seed + 1000 * (rank + 1))
    emb = [p for n, p in model.named_parameters() if n.startswith(("mf_", "mlp_"))]
    dense = [p for n, p in model.named_parameters() if not n.startswith(("mf_", "mlp_"))]
    sparse_opt = torch.optim.SparseAdam(emb, lr=args.learning_rate)
    dense_opt = torch.optim.Adam(dense, lr=args.learning_rate)
    if rank == 0:
        os.makedirs(args.checkpoint_dir, exist_ok=True)
    it = TrainIterator(train, args.batch_size, args.negative_samples, rank, world)
    max_hr, best_epoch = 0.0, -1
    for epoch in range(args.epochs):
        tot = torch.zeros(2)
        for user, item, label in it.epoch():
            loss = criterion(ddp(user, item), label).float().mean()
            sparse_opt.zero_grad()
            dense_opt.zero_grad()
            loss.backward()
            sparse_opt.step()
            dense_opt.step()
            tot += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(tot)
        hr, ndcg = val_epoch(model, test_pos, neg, clash, args.topk, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {tot[0] / tot[1]:.4f} hr@{args.topk} {hr:.4f} ndcg {ndcg:.4f}", flush=True)
        if hr > max_hr:
            max_hr, best_epoch = hr, epoch
            if rank == 0:
                torch.save(OrderedDict(model.state_dict()), os.path.join(args.checkpoint_dir, "model.pth"))
        if hr >= args.threshold:
            break
    if rank == 0:
        print(f"best hr {max_hr:.4f} at epoch {best_epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
