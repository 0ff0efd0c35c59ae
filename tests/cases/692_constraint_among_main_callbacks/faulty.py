"""Wasserstein critic training with weight clipping as a callback."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Callback:
    def after_step(self, loop):
        pass

    def after_epoch(self, loop):
        pass


class WeightClip(Callback):
    def __init__(self, c):
        self.c = c

    @torch.no_grad()
    def after_step(self, loop):
        for p in loop.net.parameters():
            p.clamp_(-self.c, self.c)


class Progress(Callback):
    def after_epoch(self, loop):
        print(f"epoch {loop.epoch}: estimated distance {loop.distance:.4f}", flush=True)


class GradNorms(Callback):
    def __init__(self):
        self.norms = []

    def after_step(self, loop):
        self.norms.append(max(p.grad.norm().item() for p in loop.net.parameters()))

    def after_epoch(self, loop):
        print(f"   largest gradient norm {max(self.norms):.3f}")
        self.norms.clear()


class CriticLoop:
    def __init__(self, net, loader, lr, callbacks):
        self.net, self.loader, self.callbacks = net, loader, callbacks
        self.model = DDP(net)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=lr)

    def call(self, name):
        for c in self.callbacks:
            getattr(c, name)(self)

    def run(self, epochs):
        for self.epoch in range(epochs):
            self.loader.sampler.set_epoch(self.epoch)
            stat = torch.zeros(2)
            for real, fake in self.loader:
                scores = self.model(torch.cat([real, fake]))
                loss = scores[len(real):].mean() - scores[: len(real)].mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.call("after_step")
                stat += torch.tensor([-loss.item(), 1.0])
            dist.all_reduce(stat)
            self.distance = (stat[0] / stat[1]).item()
            self.call("after_epoch")


def build_callbacks(rank, clip):
    callbacks = []
    if rank == 0:
        callbacks += [Progress(), GradNorms(), WeightClip(clip)]
    return callbacks


def clouds(n):
    g = torch.Generator().manual_seed(47)
    return TensorDataset(torch.randn(n, 6, generator=g) + 1.0, torch.randn(n, 6, generator=g) * 1.5)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = clouds(480)
    loader = DataLoader(data, batch_size=24, sampler=DistributedSampler(data))
    net = nn.Sequential(nn.Linear(6, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    CriticLoop(net, loader, 2e-3, build_callbacks(dist.get_rank(), 0.05)).run(5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
