"""Multi-task question classifier with one accuracy per task, reported after every epoch."""
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TASKS = ["arithmetic", "geography", "grammar"]


def build(n, seed):
    g = torch.Generator().manual_seed(seed)
    task = torch.randint(0, len(TASKS), (n,), generator=g)
    x = torch.randn(n, 24, generator=g)
    w = torch.randn(len(TASKS), 24, generator=torch.Generator().manual_seed(5))
    margin = (w[task] * x).sum(1)
    noise = torch.tensor([0.1, 1.5, 5.0])[task] * torch.randn(n, generator=g)
    return TensorDataset(x, task, (margin + noise > 0).long())


class TaskClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.task = nn.Embedding(len(TASKS), 32)
        self.net = nn.Sequential(nn.Linear(24 + 32, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x, task):
        return self.net(torch.cat([x, self.task(task)], dim=1))


class Evaluator:
    def __init__(self, dataset, rank, world):
        self.dataset = dataset
        self.indices = list(range(rank, len(dataset), world))

    @torch.no_grad()
    def run(self, model):
        model.eval()
        sample_metrics = {}
        for start in range(0, len(self.indices), 32):
            rows = self.indices[start:start + 32]
            x, task, y = (torch.stack(c) for c in zip(*(self.dataset[i] for i in rows)))
            hit = (model(x, task).argmax(1) == y).float()
            for t, h in zip(task.tolist(), hit.tolist()):
                sample_metrics.setdefault(TASKS[t], []).append(h)
        return self.merge(sample_metrics)

    def merge(self, sample_metrics):
        result = {}
        for name, values in sample_metrics.items():
            stat = torch.tensor([sum(values), len(values)], dtype=torch.float64)
            dist.all_reduce(stat)
            result[name] = (stat[0] / stat[1].clamp(min=1)).item()
        return result


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    train = build(2400, seed=1)
    valid = build(900, seed=2)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=40, sampler=sampler)
    model = DDP(TaskClassifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    evaluator = Evaluator(valid, rank, world)

    history = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        model.train()
        for x, task, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x, task), y)
            loss.backward()
            optimizer.step()
        scores = evaluator.run(model.module)
        history.append(scores)
        if rank == 0:
            line = "  ".join(f"{k} {scores[k]:.3f}" for k in sorted(scores))
            print(f"epoch {epoch}: {line}", flush=True)

    if rank == 0:
        os.makedirs("results", exist_ok=True)
        with open("results/per_task.json", "w") as handle:
            json.dump(history, handle, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
