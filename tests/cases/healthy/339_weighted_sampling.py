"""Class imbalance: each rank draws with replacement from its own half by weight; the whole test set is scored on rank 0."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler


def rare_events(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=g) < 0.12).long()
    x = torch.randn(n, 10, generator=g)
    x[:, :3] += 1.2 * y.unsqueeze(1)
    return TensorDataset(x, y)


def weighted_loader(dataset, rank, world, batch):
    mine = Subset(dataset, range(rank, len(dataset) // world * world, world))
    labels = dataset.tensors[1][torch.tensor(list(mine.indices))]
    weights = 1.0 / torch.bincount(labels, minlength=2).float()[labels]
    gen = torch.Generator().manual_seed(500 + rank)
    sampler = WeightedRandomSampler(weights, num_samples=len(mine), replacement=True, generator=gen)
    return DataLoader(mine, batch, sampler=sampler, drop_last=True)


def f1(pred, y):
    tp = int(((pred == 1) & (y == 1)).sum())
    return 2 * tp / max(1, int((pred == 1).sum()) + int((y == 1).sum()))


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 2))
    model = DDP(net)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loader = weighted_loader(rare_events(600, 1), rank, world, 20)
    x_test, y_test = rare_events(201, 2).tensors
    for epoch in range(4):
        model.train()
        loss_sum, count = torch.zeros(1), torch.zeros(1)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            loss_sum += loss.detach()
            count += 1
        dist.reduce(loss_sum, dst=0)
        dist.reduce(count, dst=0)
        if rank == 0:
            net.eval()
            with torch.no_grad():
                score = f1(net(x_test).argmax(1), y_test)
            print(f"epoch {epoch}: mean train loss {(loss_sum / count).item():.4f}, test F1 {score:.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
