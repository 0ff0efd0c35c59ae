"""torch.compile (eager backend) outside DDP, non-reentrant activation checkpointing inside the network."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.f(x)


class CheckpointedNet(nn.Module):
    def __init__(self, d=32, depth=4):
        super().__init__()
        self.stem = nn.Linear(4, d)
        self.blocks = nn.ModuleList(Residual(d) for _ in range(depth))
        self.head = nn.Linear(d, 1)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=False) if self.training else b(x)
        return self.head(x)


def franke(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 4, generator=g)
    y = (6 * x[:, 0]).sin() * x[:, 1] + (x[:, 2] - x[:, 3]) ** 2
    return TensorDataset(x, y.unsqueeze(1))


def strip(state):
    return {k.removeprefix("_orig_mod.").removeprefix("module."): v for k, v in state.items()}


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = CheckpointedNet()
    ddp = DDP(net)
    model = torch.compile(ddp, backend="eager")
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = franke(320, 1), franke(64, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            x, y = (t[rank::world] for t in test.tensors)
            se = (net(x) - y).square().sum()
        dist.all_reduce(se)
        if rank == 0:
            print(f"epoch {epoch} test mse {se.item() / len(test):.5f}")
    fresh = CheckpointedNet()
    fresh.load_state_dict(strip(model.state_dict()), strict=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
