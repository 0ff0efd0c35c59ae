"""Sharpness-aware minimisation with DDP, in the per-replica form of the paper (m-sharpness).

The first backward is local (no_sync), each rank moves to its own worst point, the second backward is
synchronised there, then the exact weights come back and the base optimizer steps.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SAM:
    def __init__(self, params, base, rho):
        self.params, self.base, self.rho = list(params), base, rho
        self.kept = []

    @torch.no_grad()
    def climb(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        self.kept = [p.detach().clone() for p in self.params]
        for p in self.params:
            p.add_(p.grad, alpha=self.rho / (norm.item() + 1e-12))

    @torch.no_grad()
    def come_back_and_step(self):
        for p, k in zip(self.params, self.kept):
            p.copy_(k)
        self.base.step()


class MixerNet(nn.Module):
    """A one-block MLP mixer on 6 patches of 8 numbers."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 32)
        self.n1, self.n2, self.n3 = nn.LayerNorm(32), nn.LayerNorm(32), nn.LayerNorm(32)
        self.tok = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.ch = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.out = nn.Linear(32, 5)

    def forward(self, x):
        x = self.inp(x)
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.ch(self.n2(x))
        return self.out(self.n3(x).mean(1))


def signals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (n,), generator=g)
    t = torch.arange(48) / 48
    f = 1 + y[:, None].float()
    x = torch.sin(6.2832 * (f * t + torch.rand(n, 1, generator=g))) + 0.6 * torch.randn(n, 48, generator=g)
    return x.view(n, 6, 8), y


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train = TensorDataset(*signals(1600, 1))
    xv, yv = signals(400, 2)
    torch.manual_seed(15)
    ddp = DDP(MixerNet())
    base = torch.optim.AdamW(ddp.parameters(), lr=3e-3, weight_decay=0.02)
    sam = SAM(ddp.parameters(), base, rho=0.05)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=40, sampler=sampler)
    epochs = 9
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(base, T_max=epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            base.zero_grad()
            with ddp.no_sync():
                first = F.cross_entropy(ddp(x), y)
                first.backward()
            sam.climb()
            base.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
            sam.come_back_and_step()
            sched.step()
        ddp.eval()
        good = torch.zeros(1)
        with torch.no_grad():
            good += (ddp.module(xv[rank::world]).argmax(1) == yv[rank::world]).sum()
        dist.all_reduce(good)
        if rank == 0:
            print(f"epoch {epoch} loss {first.item():.4f} acc {good.item() / len(yv):.3f}", flush=True)
    if rank == 0:
        torch.save(ddp.module.state_dict(), "sam.pt")
    assert good.item() / len(yv) > 0.75
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
