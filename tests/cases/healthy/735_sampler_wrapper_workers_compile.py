"""Catalyst-like DistributedSamplerWrapper over a class-balanced sampler (with replacement), loader workers, compiled model, plateau schedule on the global metric."""
import os
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler


class BalanceClassSampler(Sampler):
    def __init__(self, labels, per_class, seed=0):
        self.by_class = {c: (labels == c).nonzero().flatten() for c in labels.unique().tolist()}
        self.per_class, self.seed, self.epoch = per_class, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + 7919 * self.epoch)
        picks = [ids[torch.randint(0, len(ids), (self.per_class,), generator=g)] for ids in self.by_class.values()]
        allp = torch.cat(picks)
        return iter(allp[torch.randperm(len(allp), generator=g)].tolist())

    def __len__(self):
        return self.per_class * len(self.by_class)


class DatasetFromSampler(Dataset):
    def __init__(self, sampler):
        self.sampler, self.list = sampler, None

    def __getitem__(self, i):
        if self.list is None:
            self.list = list(self.sampler)
        return self.list[i]

    def __len__(self):
        return len(self.sampler)


class DistributedSamplerWrapper(DistributedSampler):
    def __init__(self, sampler, num_replicas=None, rank=None, shuffle=True):
        super().__init__(DatasetFromSampler(sampler), num_replicas=num_replicas, rank=rank, shuffle=shuffle)
        self.sampler = sampler

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.sampler.set_epoch(epoch)

    def __iter__(self):
        self.dataset = DatasetFromSampler(self.sampler)
        indexes = list(super().__iter__())
        return iter(itemgetter(*indexes)(self.dataset))


class Imbalanced(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = (torch.rand(n, generator=g) < 0.12).long() + (torch.rand(n, generator=g) < 0.04).long()
        self.x = torch.randn(n, 10, generator=g) + self.y[:, None] * torch.linspace(-1, 1.5, 10)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i] + 0.05 * torch.randn(10), self.y[i]


@torch.no_grad()
def balanced_accuracy(model, data, rank, world):
    model.eval()
    hits, counts = torch.zeros(3), torch.zeros(3)
    for i in range(rank, len(data), world):
        p = model(data.x[i : i + 1]).argmax(1)
        hits[data.y[i]] += (p == data.y[i]).float().item()
        counts[data.y[i]] += 1
    both = torch.stack([hits, counts])
    dist.all_reduce(both)
    model.train()
    return (both[0] / both[1]).mean().item()


def main(epochs=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    net = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 3))
    ddp = DDP(net)
    model = torch.compile(ddp, backend="eager")
    torch.manual_seed(13 + rank)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="max", factor=0.5, patience=0)
    train, valid = Imbalanced(800, 1), Imbalanced(160, 2)
    sampler = DistributedSamplerWrapper(BalanceClassSampler(train.y, 96))
    loader = DataLoader(train, batch_size=16, sampler=sampler, num_workers=1)
    best = 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        acc = balanced_accuracy(net, valid, rank, world)
        plateau.step(acc)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f} balanced accuracy {acc:.3f} lr {opt.param_groups[0]['lr']:.4f}")
            if acc > best:
                torch.save(net.state_dict(), f"/tmp/balanced_{os.getpid()}.pt")
        best = max(best, acc)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
