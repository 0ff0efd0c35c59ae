"""Click model with large embedding tables: sparse gradients for the tables, dense ones for the towers."""
import argparse
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class ClickLog(Dataset):
    def __init__(self, n, tables, dense, seed):
        truth = np.random.default_rng(77)
        factors = [truth.normal(size=(rows, 4)).astype(np.float32) for rows in tables]
        w = truth.normal(size=dense).astype(np.float32)
        rng = np.random.default_rng(seed)
        self.dense = rng.normal(size=(n, dense)).astype(np.float32)
        self.sparse = np.stack([np.minimum(rng.zipf(1.3, size=(n, 3)) - 1, rows - 1) for rows in tables], 1)
        pooled = [f[self.sparse[:, k]].mean(1) for k, f in enumerate(factors)]
        score = self.dense @ w * 0.7 + 1.5 * (pooled[0] * pooled[1]).sum(1) + pooled[2].sum(1)
        self.label = (rng.random(n) < 1 / (1 + np.exp(-score))).astype(np.float32)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.dense[i], self.sparse[i], self.label[i]


class DLRM(nn.Module):
    def __init__(self, tables, dense, d):
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, d, mode="mean", sparse=True) for rows in tables)
        for e, rows in zip(self.emb_l, tables):
            nn.init.uniform_(e.weight, -np.sqrt(1 / rows), np.sqrt(1 / rows))
        self.bot_l = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, d), nn.ReLU())
        k = len(tables) + 1
        self.register_buffer("tri", torch.tril_indices(k, k, offset=-1), persistent=False)
        self.top_l = nn.Sequential(nn.Linear(d + k * (k - 1) // 2 + len(tables) * d, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense, sparse):
        x = self.bot_l(dense)
        ly = [e(sparse[:, k]) for k, e in enumerate(self.emb_l)]
        t = torch.stack([x] + ly, 1)
        z = torch.bmm(t, t.transpose(1, 2))[:, self.tri[0], self.tri[1]]
        return self.top_l(torch.cat([x, z] + ly, 1)).squeeze(1)


def auc(score, label):
    order = score.argsort()
    rank = torch.empty_like(order, dtype=torch.float64)
    rank[order] = torch.arange(1, len(score) + 1, dtype=torch.float64)
    pos = label > 0.5
    n_pos, n_neg = pos.sum().double(), (~pos).sum().double()
    return ((rank[pos].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)).item()


@torch.no_grad()
def inference(model, dataset, rank, world, batch=512):
    model.eval()
    idx = np.arange(rank, len(dataset), world)
    out = []
    for part in np.array_split(idx, max(1, len(idx) // batch)):
        out.append(model(torch.from_numpy(dataset.dense[part]), torch.from_numpy(dataset.sparse[part])))
    gathered = [None] * world if rank == 0 else None
    dist.gather_object((torch.cat(out).numpy(), dataset.label[idx]), gathered, dst=0)
    model.train()
    if rank != 0:
        return None
    return auc(torch.from_numpy(np.concatenate([g[0] for g in gathered])),
               torch.from_numpy(np.concatenate([g[1] for g in gathered])))


def main():
    parser = argparse.ArgumentParser(description="DLRM")
    parser.add_argument("--arch-embedding-size", type=str, default="4000-3000-500")
    parser.add_argument("--arch-sparse-feature-size", type=int, default=8)
    parser.add_argument("--dense-features", type=int, default=6)
    parser.add_argument("--mini-batch-size", type=int, default=128, help="over all processes")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--sparse-learning-rate", type=float, default=0.02)
    parser.add_argument("--nepochs", type=int, default=3)
    parser.add_argument("--print-freq", type=int, default=32)
    parser.add_argument("--numpy-rand-seed", type=int, default=123)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.mini_batch_size % world:
        sys.exit("mini batch size has to be divisible by the number of processes")
    torch.manual_seed(args.numpy_rand_seed)

    tables = [int(s) for s in args.arch_embedding_size.split("-")]
    train_data, test_data = (ClickLog(n, tables, args.dense_features, s) for n, s in ((8192, 1), (3001, 2)))
    sampler = DistributedSampler(train_data, shuffle=True, drop_last=True)
    loader = DataLoader(train_data, batch_size=args.mini_batch_size // world, sampler=sampler, drop_last=True)
    dlrm = DDP(DLRM(tables, args.dense_features, args.arch_sparse_feature_size))
    sparse_params = list(dlrm.module.emb_l.parameters())
    sparse_ids = {id(p) for p in sparse_params}
    opt_sparse = torch.optim.SparseAdam(sparse_params, lr=args.sparse_learning_rate)
    opt_dense = torch.optim.Adagrad([p for p in dlrm.parameters() if id(p) not in sparse_ids], lr=args.learning_rate)
    loss_fn = nn.BCEWithLogitsLoss()

    for epoch in range(args.nepochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        start = time.perf_counter()
        for j, (dense, sparse, label) in enumerate(loader, 1):
            opt_sparse.zero_grad()
            opt_dense.zero_grad()
            loss = loss_fn(dlrm(dense, sparse), label)
            loss.backward()
            opt_sparse.step()
            opt_dense.step()
            total += torch.tensor([loss.item() * len(label), len(label)])
            if j % args.print_freq == 0:
                shown = total.clone()
                dist.reduce(shown, dst=0)
                if rank == 0:
                    ms = 1000 * (time.perf_counter() - start) / j
                    print(f"Finished training it {j}/{len(loader)} of epoch {epoch}, {ms:.2f} ms/it, "
                          f"loss {shown[0] / shown[1]:.6f}")
        score = inference(dlrm.module, test_data, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: test auc {score:.4f}")
            torch.save({"epoch": epoch, "state_dict": dlrm.module.state_dict(), "opt_dense": opt_dense.state_dict(),
                        "opt_sparse": opt_sparse.state_dict()}, "dlrm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
