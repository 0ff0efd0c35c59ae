"""Early stopping: rank 0 alone scores the validation set, tells the others, and everybody goes back to the best weights."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopper:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.weights, self.epoch = patience, float("inf"), 0, None, -1

    def update(self, value, net, epoch):
        if value < self.best - 1e-4:
            self.best, self.bad, self.epoch = value, 0, epoch
            self.weights = copy.deepcopy(net.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    y = (x[:, 0] + 0.3 * x[:, 1:].sum(1) + 1.2 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(x, y)


@torch.no_grad()
def validate(net, loader):
    net.eval()
    total = sum(F.binary_cross_entropy_with_logits(net(x).squeeze(1), y, reduction="sum").item() for x, y in loader)
    net.train()
    return total / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    model = DDP(net)
    train = make(160, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    valid = DataLoader(make(300, 2), batch_size=100) if rank == 0 else None
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    stopper = EarlyStopper(patience=2)

    for epoch in range(30):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        score = torch.zeros(1)
        if rank == 0:
            score.fill_(validate(net, valid))  # the bare network: the others are waiting below
        dist.broadcast(score, src=0)
        plateau.step(score.item())
        if rank == 0:
            print(f"epoch {epoch}: validation {score.item():.4f} lr {opt.param_groups[0]['lr']:.5f}")
        if stopper.update(score.item(), net, epoch):
            break

    net.load_state_dict(stopper.weights)
    if rank == 0:
        print(f"stopped after {epoch + 1} of 30 epochs, back to epoch {stopper.epoch}: {validate(net, valid):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
