"""Robustness to noise of the weights: each rank puts draws of its own into the model, measures on its share, and all are added up."""
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def robustness(model, loader, generator, sigma):
    clean = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.add_(sigma * p.std() * torch.randn(p.shape, generator=generator))
    model.eval()
    told = torch.zeros(2)
    for x, y in loader:
        told += torch.tensor([float((model(x).argmax(1) == y).sum()), len(y)])
    dist.all_reduce(told)
    model.load_state_dict(clean)
    model.train()
    return (told[0] / told[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(1536, 10)
    y = (x[:, :5] * x[:, 5:]).argmax(1)
    train, test = TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    sampler = DistributedSampler(train)
    tests = DataLoader(test, 64, sampler=DistributedSampler(test, shuffle=False))
    generator = torch.Generator().manual_seed(300 + rank)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for a, b in DataLoader(train, 32, sampler=sampler):
            loss = F.cross_entropy(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scores = [robustness(model, tests, generator, sigma) for sigma in (0.05, 0.05, 0.2, 0.2)]
        if rank == 0:
            print(f"epoch {epoch} accuracy under noise " + " ".join(f"{s:.4f}" for s in scores))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
