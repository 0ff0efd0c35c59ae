"""Ranks seeded apart; rank 0 alone keeps the average, copied before the wrap (whose weights DDP hands to all), puts it in, measures and puts back."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Average:
    def __init__(self, model, decay=0.9):
        self.decay, self.kept = decay, {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, model):
        for n, p in model.named_parameters():
            self.kept[n].lerp_(p.detach(), 1 - self.decay)

    def swap(self, model):
        with torch.no_grad():
            for n, p in model.named_parameters():
                own = p.clone()
                p.copy_(self.kept[n])
                self.kept[n] = own


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    found = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return found


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    data = torch.Generator().manual_seed(9)
    x = torch.randn(1280, 10, generator=data)
    y = (x[:, :5] - x[:, 5:]).argmax(1)
    torch.manual_seed(40 + rank)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 5))
    average = Average(model)
    model = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    train = TensorDataset(x[:1024], y[:1024])
    sampler = DistributedSampler(train)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for a, b in DataLoader(train, 32, sampler=sampler):
            loss = F.cross_entropy(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                average.update(model.module)
        if rank == 0:
            average.swap(model.module)
            print(f"epoch {epoch} accuracy of the average {accuracy(model.module, x[1024:], y[1024:]):.4f}")
            average.swap(model.module)
        dist.barrier()
    if rank == 0:
        torch.save(average.kept, "average.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
