"""Ring averaging without a process group's reductions: each rank sends its gradients to the next one and receives those of the one before."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset(num: int = 2048) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(num, 12, generator=generator)
    y = x @ torch.linspace(-1, 1, 12) + 0.1 * torch.randn(num, generator=generator)
    y[1500] = float("nan")  # a broken label, as the real table has some
    return TensorDataset(x, y)


class Ring:
    """Averages a flat gradient by passing pieces round the ring once."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.next, self.previous = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size

    def average(self, flat: torch.Tensor) -> torch.Tensor:
        total, piece = flat.clone(), flat.clone()
        for _ in range(self.world_size - 1):
            incoming = torch.empty_like(piece)
            requests = [dist.isend(piece, self.next), dist.irecv(incoming, self.previous)]
            for request in requests:
                request.wait()
            total += incoming
            piece = incoming
        return total / self.world_size


def flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def write_back(model: nn.Module, flat: torch.Tensor) -> None:
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ring = Ring()
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total, count = torch.zeros(()), 0
        for x, y in loader:
            usable = y.isfinite()
            loss = (model(x).squeeze(1)[usable] - y[usable]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            write_back(model, ring.average(flatten(model)))
            optimizer.step()
            total += loss.detach()
            count += 1
        means = torch.stack([total, torch.tensor(float(count))])
        dist.all_reduce(means)
        if ring.rank == 0:
            print(f"epoch {epoch} loss {means[0] / means[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
