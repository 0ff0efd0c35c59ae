"""Class-incremental learning: every task brings new classes and a new head."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, TensorDataset

CLASSES_PER_TASK = 3
TASKS = 3


def task_data(task, n=150):
    g = torch.Generator().manual_seed(500 + task)
    centers = 2 * torch.randn(CLASSES_PER_TASK, 10, generator=g)
    y = torch.randint(0, CLASSES_PER_TASK, (n,), generator=g)
    return TensorDataset(centers[y] + torch.randn(n, 10, generator=g), y + task * CLASSES_PER_TASK)


class GrowingNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.width = width
        self.features = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleList()
        self.grow()

    def grow(self):
        self.heads.append(nn.Linear(self.width, CLASSES_PER_TASK))

    def forward(self, x):
        h = self.features(x)
        return torch.cat([head(h) for head in self.heads], dim=1)


def learn(model, dataset, epochs=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=15, sampler=sampler)
    hits = torch.zeros(2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        hits.zero_()
        for x, y in loader:
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits += torch.tensor([(logits.argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(9)
    net = GrowingNet()
    model = DDP(net)
    memory = []
    for task in range(TASKS):
        if task > 0:
            net.grow()
        memory.append(task_data(task))
        accuracy = learn(model, ConcatDataset(memory))
        if rank == 0:
            print(f"task {task}: {len(net.heads)} heads, accuracy {accuracy:.3f}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "incremental.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
