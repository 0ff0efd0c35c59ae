"""Shape recognition on point clouds with a shared point-wise network."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Clouds(Dataset):
    """Noisy points on a sphere, on a cube or on a disc."""

    def __init__(self, n=258, points=32):
        g = torch.Generator().manual_seed(73)
        self.label = torch.randint(0, 3, (n,), generator=g)
        p = torch.randn(n, points, 3, generator=g)
        sphere = F.normalize(p, dim=-1)
        cube = p / p.abs().amax(-1, keepdim=True)
        disc = sphere * torch.tensor([1.0, 1.0, 0.1])
        kinds = torch.stack([sphere, cube, disc])
        self.cloud = kinds[self.label, torch.arange(n)] + 0.05 * torch.randn(n, points, 3, generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.cloud[i].t(), self.label[i]


class PointNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.points = nn.Sequential(nn.Conv1d(3, 24, 1), nn.BatchNorm1d(24), nn.ReLU(), nn.Conv1d(24, 48, 1))
        self.cloud = nn.Sequential(nn.Linear(48, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, classes))

    def forward(self, cloud):
        return self.cloud(self.points(cloud).amax(-1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    model = DDP(PointNet())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    data = Clouds()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        counts = torch.zeros(2)
        for cloud, label in loader:
            out = model(cloud)
            loss = F.cross_entropy(out, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            counts += torch.tensor([(out.argmax(1) == label).sum().item(), len(label)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {(counts[0] / counts[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
