"""Action spotting in short feature sequences: train with EMA, save, then test from the file."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Clips(Dataset):
    def __init__(self, n, seed, length=24, dim=8, classes=5):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
        self.label = torch.randint(0, classes, (n,), generator=g)
        self.feat = 0.6 * torch.randn(n, dim, length, generator=g)
        start = torch.randint(0, length - 6, (n,), generator=g)
        for i in range(n):
            self.feat[i, :, start[i]:start[i] + 6] += proto[self.label[i]][:, None]

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.feat[i], self.label[i]


class Spotter(nn.Module):
    def __init__(self, dim=8, width=32, classes=5):
        super().__init__()
        self.projection = nn.Sequential(nn.Conv1d(dim, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU())
        self.neck = nn.Sequential(nn.Conv1d(width, width, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.neck(self.projection(x)).amax(2))


class ModelEma:
    def __init__(self, model, decay=0.95):
        self.module = copy.deepcopy(model).eval()
        self.module.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p, alpha=1 - self.decay)


@torch.no_grad()
def evaluate(net, dataset):
    rank, world = dist.get_rank(), dist.get_world_size()
    hits = torch.zeros(2)
    for i in range(rank, len(dataset), world):
        x, y = dataset[i]
        hits += torch.tensor([float(net(x[None]).argmax(1).item() == y), 1.0])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def save_checkpoint(path, model, ema, epoch):
    torch.save({"epoch": epoch, "state_dict": model.module.state_dict(), "state_dict_ema": ema.module.state_dict()},
               path)


def test(path, rank):
    net = Spotter().eval()
    ckpt = torch.load(path, weights_only=True)
    net.load_state_dict(ckpt["state_dict_ema"], strict=False)
    score = evaluate(net, Clips(80, seed=3))
    if rank == 0:
        print(f"test (ema of epoch {ckpt['epoch']}): {score:.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--path", default="last.pth")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Spotter())
    ema = ModelEma(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_set, val_set = Clips(256, seed=1), Clips(60, seed=2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
        net = ema.module.module
        score = evaluate(net, val_set)
        if rank == 0:
            print(f"epoch {epoch}: ema val {score:.3f}", flush=True)
            save_checkpoint(args.path, model, ema, epoch)
    dist.barrier()
    test(args.path, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
