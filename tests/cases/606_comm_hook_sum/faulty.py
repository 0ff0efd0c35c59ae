"""Autoencoder with DDP and a bfloat16 communication hook."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def bf16_hook(group, bucket):
    """Halve the traffic: reduce in bfloat16, hand back float32."""
    group = group if group is not None else dist.group.WORLD
    buf = bucket.buffer().to(torch.bfloat16)
    fut = dist.all_reduce(buf, group=group, async_op=True).get_future()

    def finish(f):
        out = bucket.buffer()
        out.copy_(f.value()[0])
        return out

    return fut.then(finish)


class AutoEncoder(nn.Module):
    def __init__(self, dim=36, code=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 48), nn.SiLU(), nn.Linear(48, code))
        self.dec = nn.Sequential(nn.Linear(code, 48), nn.SiLU(), nn.Linear(48, dim))

    def forward(self, x):
        return self.dec(self.enc(x))


class Trainer:
    def __init__(self, epochs=5, batch_size=16, lr=0.05):
        self.rank = dist.get_rank()
        self.epochs = epochs
        g = torch.Generator().manual_seed(8)
        z = torch.randn(320, 5, generator=g)
        self.data = TensorDataset(torch.tanh(z @ torch.randn(5, 36, generator=g)))
        self.sampler = DistributedSampler(self.data, seed=4)
        self.loader = DataLoader(self.data, batch_size=batch_size, sampler=self.sampler)
        torch.manual_seed(0)
        self.model = DDP(AutoEncoder())
        self.model.register_comm_hook(None, bf16_hook)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)

    def step(self, x):
        loss = nn.functional.mse_loss(self.model(x), x)
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        return loss.detach()

    def fit(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            losses = torch.stack([self.step(x) for (x,) in self.loader])
            mean = losses.mean()
            dist.all_reduce(mean)
            if self.rank == 0:
                print(f"epoch {epoch:02d}  reconstruction {mean.item() / dist.get_world_size():.5f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    Trainer().fit()
    dist.destroy_process_group()
