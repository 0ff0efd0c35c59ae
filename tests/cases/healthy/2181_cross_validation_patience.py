"""K-fold cross-validation in one process group. Rank 0 validates, decides about patience and tells the others."""
import logging
import statistics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

log = logging.getLogger("cv")
FOLDS, MAX_EPOCHS, PATIENCE, BATCH = 3, 12, 2, 32


class Houses(Dataset):
    def __init__(self, n=900):
        g = torch.Generator().manual_seed(8)
        self.x = torch.randn(n, 10, generator=g)
        y = self.x[:, 0] * self.x[:, 1] + self.x[:, 2].abs() - 0.5 * self.x[:, 3] + 0.2 * torch.randn(n, generator=g)
        self.y = y[:, None]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Scaled(nn.Module):
    """standardises the inputs with statistics of the training part of the fold"""

    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.body = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Dropout(0.05), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.body((x - self.mean) / self.std)


class Referee:
    """keeps the best weights; lives on rank 0"""

    def __init__(self, patience):
        self.patience, self.best, self.bad, self.state = patience, float("inf"), 0, None

    def update(self, value, module):
        if value < self.best - 1e-3:
            self.best, self.bad = value, 0
            self.state = {k: v.detach().clone() for k, v in module.state_dict().items()}
        else:
            self.bad += 1
        return self.bad >= self.patience


def folds(n, k):
    parts = torch.randperm(n, generator=torch.Generator().manual_seed(99)).chunk(k)
    for i in range(k):
        yield i, torch.cat([p for j, p in enumerate(parts) if j != i]).tolist(), parts[i].tolist()


@torch.no_grad()
def validate(module, data, ids):
    module.eval()
    loss = nn.functional.mse_loss(module(data.x[ids]), data.y[ids]).item()
    module.train()
    return loss


def run_fold(index, data, train_ids, valid_ids, rank):
    torch.manual_seed(index * 10 + rank)
    model = DistributedDataParallel(Scaled(data.x[train_ids].mean(0), data.x[train_ids].std(0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    subset = Subset(data, train_ids)
    sampler = DistributedSampler(subset, seed=index)
    loader = DataLoader(subset, BATCH, sampler=sampler)
    referee = Referee(PATIENCE) if rank == 0 else None
    for epoch in range(MAX_EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        verdict = torch.zeros(2, dtype=torch.double)
        if rank == 0:
            value = validate(model.module, data, valid_ids)
            verdict[0], verdict[1] = value, float(referee.update(value, model.module))
            log.info("fold %d epoch %2d valid %.4f lr %.1e", index, epoch, value, optimizer.param_groups[0]["lr"])
        dist.broadcast(verdict, src=0)
        plateau.step(verdict[0].item())                 # the same number everywhere, so the rates stay equal
        if verdict[1] > 0:
            break
    if rank == 0:
        model.module.load_state_dict(referee.state)
        torch.save(referee.state, f"fold{index}.pt")
    best = [referee.best if rank == 0 else None]
    dist.broadcast_object_list(best, src=0)
    for tensor in model.module.state_dict().values():
        dist.broadcast(tensor, src=0)
    return model.module, best[0]


@torch.no_grad()
def ensemble_error(models, rank, world):
    """folds as an ensemble on fresh data, split over the ranks"""
    g = torch.Generator().manual_seed(123)
    x = torch.randn(401, 10, generator=g)
    y = x[:, 0] * x[:, 1] + x[:, 2].abs() - 0.5 * x[:, 3]
    x, y = x[rank::world], y[rank::world]
    mean = torch.stack([m.eval()(x).squeeze(1) for m in models]).mean(0)
    total = torch.tensor([(mean - y).pow(2).sum().item(), float(len(y))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    data, models, scores = Houses(), [], []
    for index, train_ids, valid_ids in folds(len(data), FOLDS):
        model, best = run_fold(index, data, train_ids, valid_ids, rank)
        models.append(model)
        scores.append(best)
    final = ensemble_error(models, rank, world)
    log.info("cv %.4f +- %.4f, ensemble %.4f", statistics.mean(scores), statistics.stdev(scores), final)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
