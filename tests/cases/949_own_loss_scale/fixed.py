"""bfloat16 training with a home-made loss scale that follows the loss."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HP = {"lr": 1e-2, "epochs": 4, "batch": 12, "target": 512.0, "precision": "bf16"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class FollowingScale:
    """Keeps scale * loss near `target`, so that small late losses do not underflow."""

    def __init__(self, target):
        self.target = target
        self.value = 1.0

    def choose(self, loss):
        level = loss.detach().float().clone()
        dist.all_reduce(level)
        level /= dist.get_world_size()
        self.value = 2.0 ** math.floor(math.log2(self.target / max(level.item(), 1e-6)))
        return self.value

    def backward(self, loss):
        (loss * self.choose(loss)).backward()

    @torch.no_grad()
    def unscale_(self, params):
        for p in params:
            if p.grad is not None:
                p.grad.div_(self.value)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(14, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU())
        self.out = nn.Linear(48, 2)

    def forward(self, x):
        return self.out(self.body(x))


def sensors(n=360):
    gen = torch.Generator().manual_seed(64)
    x = torch.randn(n, 14, generator=gen)
    w = torch.randn(14, 2, generator=gen)
    return TensorDataset(x, torch.sin(x @ w) + 0.5 * x[:, :2])


def train(rank):
    torch.manual_seed(7)
    model = DDP(Regressor())
    optimizer = torch.optim.SGD(model.parameters(), lr=HP["lr"], momentum=0.9)
    scale = FollowingScale(HP["target"])
    data = sensors()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=HP["batch"], sampler=sampler)
    dtype = DTYPES[HP["precision"]]
    for epoch in range(HP["epochs"]):
        sampler.set_epoch(epoch)
        mse = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
                out = model(x)
            loss = nn.functional.mse_loss(out.float(), y)
            scale.backward(loss)
            scale.unscale_(model.parameters())
            optimizer.step()
            mse += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(mse)
        if rank == 0:
            print(f"epoch {epoch}: mse {mse[0] / mse[1]:.4f}, loss scale 2**{int(math.log2(scale.value))}")


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(int(os.environ["RANK"]))
    dist.destroy_process_group()
