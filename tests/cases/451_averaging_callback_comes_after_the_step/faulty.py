"""A trainer that consists of ordered callbacks (as in fastai)."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Callback:
    order = 0

    def __init__(self, trainer):
        self.trainer = trainer


class OptimizerStep(Callback):
    order = 50

    def after_backward(self):
        self.trainer.opt.step()
        self.trainer.opt.zero_grad(set_to_none=False)


class ClipGradients(Callback):
    order = 40

    def after_backward(self):
        nn.utils.clip_grad_value_(self.trainer.net.parameters(), 1.0)


class AverageGradients(Callback):
    order = 60

    def before_fit(self):
        for t in self.trainer.net.state_dict().values():
            dist.broadcast(t, 0)

    def after_backward(self):
        for p in self.trainer.net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class Record(Callback):
    order = 90

    def before_fit(self):
        self.sum = torch.zeros(2)

    def after_backward(self):
        self.sum += torch.tensor([self.trainer.loss.item(), 1.0])

    def after_epoch(self):
        dist.all_reduce(self.sum)
        if dist.get_rank() == 0:
            print(f"epoch {self.trainer.epoch}: {(self.sum[0] / self.sum[1]).item():.4f}")
        self.sum.zero_()


class Trainer:
    def __init__(self, net, loss_fn, lr, callbacks):
        self.net, self.loss_fn = net, loss_fn
        self.opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        self.callbacks = sorted((c(self) for c in callbacks), key=lambda c: c.order)

    def __call__(self, event):
        for cb in self.callbacks:
            getattr(cb, event, lambda: None)()

    def fit(self, loader, epochs):
        self("before_fit")
        for self.epoch in range(epochs):
            loader.sampler.set_epoch(self.epoch)
            for x, y in loader:
                self.loss = self.loss_fn(self.net(x), y)
                self.loss.backward()
                self("after_backward")
            self("after_epoch")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ["RANK"]))
    g = torch.Generator().manual_seed(1)
    x = torch.randn(480, 13, generator=g)
    y = (x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 2] > 0).long()
    data = TensorDataset(x, y)
    loader = DataLoader(data, 20, sampler=DistributedSampler(data))
    net = nn.Sequential(nn.Linear(13, 40), nn.ReLU(), nn.Linear(40, 4))
    Trainer(net, nn.CrossEntropyLoss(), 0.05, [Record, OptimizerStep, AverageGradients, ClipGradients]).fit(loader, 4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
