"""Centre loss: the network is in DDP, the centres are kept in the loss object."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CentreLoss(nn.Module):
    def __init__(self, classes, dim):
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(classes, dim))

    def forward(self, features, label):
        return (features - self.centres[label]).square().sum(1).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Linear(48, 8))
        self.logits = nn.Linear(8, 4)

    def forward(self, x):
        f = self.features(x)
        return f, self.logits(f)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(9)
    x = torch.randn(256, 14, generator=g)
    data = TensorDataset(x, x[:, :4].argmax(1))
    model, centre = DDP(Net()), CentreLoss(4, 8)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    centre_opt = torch.optim.SGD(centre.parameters(), lr=0.5)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for a, y in loader:
            f, logits = model(a)
            loss = F.cross_entropy(logits, y) + 0.02 * centre(f, y)
            opt.zero_grad()
            centre_opt.zero_grad()
            loss.backward()
            dist.all_reduce(centre.centres.grad)
            centre.centres.grad /= 0.02 * world
            opt.step()
            centre_opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}, centres {centre.centres.norm().item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
