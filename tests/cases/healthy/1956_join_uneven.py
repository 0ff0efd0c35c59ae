"""Processes with different amounts of data train together; Join shadows the collectives of the one that is done."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def clinic(rank):
    """Every process has the patients of one clinic; the clinics differ in size."""
    g = torch.Generator().manual_seed(60 + rank)
    x = torch.randn(512 - 96 * rank, 16, generator=g)
    risk = x[:, 0] * x[:, 1] + x[:, 2] - 0.5 * x[:, 3].square() + 0.3
    return TensorDataset(x, (risk > 0).float())


def shared_test(n=300):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, 16, generator=g)
    return x, x[:, 0] * x[:, 1] + x[:, 2] - 0.5 * x[:, 3].square() + 0.3 > 0


def train_epoch(model, opt, loader):
    total, count = 0.0, 0
    with Join([model]):
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(y)
            count += len(y)
    return total, count


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    # plain SGD: there is no state that the process which is done first could miss
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = DataLoader(
        clinic(rank), batch_size=32, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(200 + rank)
    )
    x, truth = shared_test()

    for epoch in range(10):
        model.train()
        stat = torch.tensor(train_epoch(model, opt, loader), dtype=torch.float64)
        dist.all_reduce(stat)
        if rank == 0:
            # the test set is the same everywhere and small, one process is enough
            model.eval()
            with torch.no_grad():
                acc = ((model.module(x).squeeze(1) > 0) == truth).float().mean().item()
            print(f"epoch {epoch}: loss {(stat[0] / stat[1]).item():.4f} accuracy {acc:.3f}", flush=True)
    # the last process to finish holds the final weights, Join hands them to the others
    if rank == 0:
        torch.save(model.module.state_dict(), "clinics.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
