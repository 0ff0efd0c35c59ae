"""Point-cloud classifier. The projection's input size depends on the pooling options, so it is made on first use."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Clouds(Dataset):
    def __init__(self, n, points=24, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 3, (n,), generator=gen)
        raw = torch.randn(n, points, 3, generator=gen)
        scale = torch.tensor([[1.0, 1.0, 1.0], [2.0, 1.0, 0.3], [0.4, 0.4, 2.5]])
        self.xyz = raw * scale[self.label][:, None]

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.xyz[i], self.label[i]


class PointNet(nn.Module):
    POOLS = {"max": lambda f: f.amax(1), "mean": lambda f: f.mean(1), "std": lambda f: f.std(1)}

    def __init__(self, pools, width=32, classes=3):
        super().__init__()
        self.pools = pools
        self.point = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.width = width
        self.proj = None
        self.head = nn.Linear(width, classes)

    def project(self, pooled):
        if self.proj is None:
            self.proj = nn.Linear(pooled.shape[-1], self.width).to(pooled.device)
        return torch.relu(self.proj(pooled))

    def forward(self, xyz):
        feats = self.point(xyz)
        return self.head(self.project(torch.cat([self.POOLS[p](feats) for p in self.pools], dim=-1)))


class Experiment:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        self.data = Clouds(360)
        self.sampler = DistributedSampler(self.data, shuffle=True)
        self.loader = DataLoader(self.data, batch_size=args.batch_size, sampler=self.sampler)
        net = PointNet(args.pools.split(","))
        self.probe(net)
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)

    @torch.no_grad()
    def probe(self, model):
        sample, _ = self.data[0]
        out = model(sample[None])
        if self.rank == 0:
            print("probe:", tuple(out.shape), "parameters:", sum(p.numel() for p in model.parameters()))

    def train(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            hits = torch.zeros(2)
            for xyz, label in self.loader:
                logits = self.model(xyz)
                loss = nn.functional.cross_entropy(logits, label)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                hits += torch.tensor([(logits.argmax(1) == label).sum().item(), len(label)])
            dist.all_reduce(hits)
            if self.rank == 0:
                print(f"epoch {epoch}: train accuracy {hits[0] / hits[1]:.3f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pools", default="max,mean,std")
    ap.add_argument("--batch-size", type=int, default=15)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=40)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed + int(os.environ["RANK"]))
    Experiment(args).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
