"""Transfer learning with a callback that unfreezes the backbone, in the style of fit/callback libraries."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Callback:
    def on_epoch_begin(self, learner, epoch): ...
    def on_epoch_end(self, learner, epoch, logs): ...


class Unfreeze(Callback):
    def __init__(self, at_epoch, lr):
        self.at_epoch, self.lr = at_epoch, lr

    def on_epoch_begin(self, learner, epoch):
        if epoch == self.at_epoch:
            learner.net.backbone.requires_grad_(True)
            learner.opt.add_param_group({"params": list(learner.net.backbone.parameters()), "lr": self.lr})


class Report(Callback):
    def on_epoch_end(self, learner, epoch, logs):
        if learner.rank == 0:
            print("epoch", epoch, {k: round(v, 4) for k, v in logs.items()})


class Transfer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU())
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


class Learner:
    def __init__(self, net, lr, callbacks):
        self.net, self.callbacks = net, callbacks
        self.rank = int(os.environ["RANK"])
        self.opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=lr, momentum=0.9)
        self.parallelize()

    def parallelize(self):
        self.model = DDP(self.net)

    def emit(self, name, *args):
        for cb in self.callbacks:
            getattr(cb, name)(self, *args)

    def fit(self, dataset, epochs, batch):
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            self.emit("on_epoch_begin", epoch)
            acc = torch.zeros(2)
            for x, y in loader:
                out = self.model(x)
                self.opt.zero_grad()
                nn.functional.cross_entropy(out, y).backward()
                self.opt.step()
                acc += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
            dist.all_reduce(acc)
            self.emit("on_epoch_end", epoch, {"train_accuracy": (acc[0] / acc[1]).item()})


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(10)
    net = Transfer()
    net.backbone.requires_grad_(False)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(320, 18, generator=g)
    y = x.view(320, 3, 6).norm(dim=2).argmax(1)
    learner = Learner(net, 0.05, [Unfreeze(at_epoch=2, lr=0.02), Report()])
    learner.fit(TensorDataset(x, y), epochs=5, batch=20)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
