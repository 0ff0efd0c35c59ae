"""BYOL after lucidrains/byol-pytorch: the target encoder lives inside the learner module, momentum update from outside, under DDP."""
import copy
import os
from functools import wraps

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def singleton(cache_key):
    def inner_fn(fn):
        @wraps(fn)
        def wrapper(self, *args, **kwargs):
            instance = getattr(self, cache_key)
            if instance is not None:
                return instance
            instance = fn(self, *args, **kwargs)
            setattr(self, cache_key, instance)
            return instance
        return wrapper
    return inner_fn


def set_requires_grad(model, val):
    for p in model.parameters():
        p.requires_grad = val


def loss_fn(x, y):
    return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        return new if old is None else old * self.beta + (1 - self.beta) * new


def update_moving_average(ema_updater, ma_model, current_model):
    for current, ma in zip(current_model.parameters(), ma_model.parameters()):
        ma.data = ema_updater.update_average(ma.data, current.data)


def MLP(dim, size, hidden=64):
    return nn.Sequential(nn.Linear(dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, size))


class NetWrapper(nn.Module):
    def __init__(self, net, feat, size):
        super().__init__()
        self.net = net
        self.projector = MLP(feat, size)

    def forward(self, x):
        rep = self.net(x).flatten(1)
        return self.projector(rep), rep


class BYOL(nn.Module):
    def __init__(self, net, feat=144, size=16, decay=0.97):
        super().__init__()
        self.online_encoder = NetWrapper(net, feat, size)
        self.target_encoder = None
        self.target_ema_updater = EMA(decay)
        self.online_predictor = MLP(size, size)
        with torch.no_grad():
            self.forward(torch.randn(2, 1, 8, 8))

    @singleton("target_encoder")
    def _get_target_encoder(self):
        t = copy.deepcopy(self.online_encoder)
        set_requires_grad(t, False)
        return t

    def update_moving_average(self):
        update_moving_average(self.target_ema_updater, self.target_encoder, self.online_encoder)

    def augment(self, x):
        x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)
        return x + 0.2 * torch.randn_like(x)

    def forward(self, x):
        one, two = self.augment(x), self.augment(x)
        proj, _ = self.online_encoder(torch.cat((one, two)))
        pred_one, pred_two = self.online_predictor(proj).chunk(2)
        with torch.no_grad():
            target = self._get_target_encoder()
            t, _ = target(torch.cat((one, two)))
            t_one, t_two = t.detach().chunk(2)
        return (loss_fn(pred_one, t_two) + loss_fn(pred_two, t_one)).mean()


class SelfSupervisedLearner:
    def __init__(self, net, lr=3e-3):
        self.learner = DDP(BYOL(net))
        self.optimizer = torch.optim.Adam(self.learner.parameters(), lr=lr)

    def training_step(self, images):
        return self.learner(images)

    def on_before_zero_grad(self):
        self.learner.module.update_moving_average()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            meter = torch.zeros(2)
            for (images,) in loader:
                loss = self.training_step(images)
                self.on_before_zero_grad()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                meter += torch.tensor([loss.item(), 1.0])
            dist.all_reduce(meter)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {(meter[0] / meter[1]).item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    g = torch.Generator().manual_seed(6)
    proto = torch.randn(6, 1, 8, 8, generator=g)
    data = TensorDataset(proto[torch.randint(0, 6, (320,), generator=g)] + 0.3 * torch.randn(320, 1, 8, 8, generator=g))
    net = nn.Sequential(nn.Conv2d(1, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    learner = SelfSupervisedLearner(net)
    learner.fit(DataLoader(data, batch_size=20, sampler=DistributedSampler(data), drop_last=True), 5)
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), os.path.join("/tmp", f"improved-net-{os.getpid()}.pt"))
    dist.destroy_process_group()
