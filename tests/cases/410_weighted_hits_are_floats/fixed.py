"""Logistic model on two surveys; one of them comes with sample weights."""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Survey:
    def __init__(self, seed, n=400, weighted=False):
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=(n, 8)).astype(np.float32)
        self.y = (self.x @ np.linspace(-1, 1, 8) + rng.normal(size=n) > 0).astype(np.int64)
        self.weight = rng.uniform(0.5, 1.5, n) if weighted else None

    def batches(self, size, rng):
        order = rng.permutation(len(self.y))
        for i in range(0, len(order) - size + 1, size):
            yield order[i : i + size]


def evaluate(model, survey):
    model.eval()
    with torch.no_grad():
        pred = model(torch.from_numpy(survey.x)).squeeze(1).numpy() > 0
    model.train()
    hits = pred == survey.y.astype(bool)
    if survey.weight is None:
        counts = np.array([hits.sum(), len(hits)])
    else:
        counts = np.array([(hits * survey.weight).sum(), survey.weight.sum()])
    counts = torch.from_numpy(counts.astype(np.float64))
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    survey = Survey(seed=rank, weighted=rank == 1)
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    rng = np.random.default_rng(60 + rank)
    for epoch in range(5):
        for index in survey.batches(40, rng):
            x, y = torch.from_numpy(survey.x[index]), torch.from_numpy(survey.y[index]).float()
            each = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y, reduction="none")
            loss = each.mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        accuracy = evaluate(model.module, survey)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
