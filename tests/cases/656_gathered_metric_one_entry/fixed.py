"""Click prediction with a global AUC."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def clicks(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    p = torch.sigmoid(x[:, 0] - x[:, 1] * x[:, 2])
    return TensorDataset(x, (torch.rand(n, generator=g) < p).float())


def auc(score, label):
    order = score.argsort()
    rank = torch.empty_like(score)
    rank[order] = torch.arange(1, len(score) + 1, dtype=score.dtype)
    pos = label.sum()
    neg = len(label) - pos
    return ((rank[label == 1].sum() - pos * (pos + 1) / 2) / (pos * neg)).item()


def gather_all(local):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return parts


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    scores, labels = [], []
    for x, y in loader:
        scores.append(model(x).squeeze(1))
        labels.append(y)
    parts = gather_all((torch.cat(scores), torch.cat(labels)))
    model.train()
    return auc(torch.cat([s for s, _ in parts]), torch.cat([y for _, y in parts]))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, val = clicks(400, 1), clicks(160, 2)
    loader = DataLoader(train, args.batch_size, sampler=DistributedSampler(train))
    val_loader = DataLoader(val, 40, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        value = evaluate(model, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: validation AUC {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
