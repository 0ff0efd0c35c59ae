"""A trainer with an overridable backward; the accumulating subclass saves communication."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, net, lr):
        self.model = DDP(net)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.micro = 0

    def compute_loss(self, x, y):
        return nn.functional.mse_loss(self.model(x), y)

    def backward(self, loss):
        loss.backward()

    def should_step(self):
        return True

    def training_step(self, x, y):
        loss = self.compute_loss(x, y)
        self.backward(loss)
        self.micro += 1
        if self.should_step():
            self.opt.step()
            self.opt.zero_grad(set_to_none=True)
        return loss.detach()


class AccumulatingTrainer(Trainer):
    def __init__(self, net, lr, accumulate):
        super().__init__(net, lr)
        self.accumulate = accumulate

    def should_step(self):
        return self.micro % self.accumulate == 0

    def backward(self, loss):
        last = (self.micro + 1) % self.accumulate == 0
        if last:
            super().backward(loss / self.accumulate)
        else:
            with self.model.no_sync():
                super().backward(loss / self.accumulate)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(6)
    x = torch.randn(768, 16, generator=g)
    y = torch.stack([x[:, :8].sum(1).sin(), x[:, 8:].prod(1).tanh()], 1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    trainer = AccumulatingTrainer(nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 2)), 0.05, accumulate=4)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for xb, yb in loader:
            total += torch.tensor([trainer.training_step(xb, yb).item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
