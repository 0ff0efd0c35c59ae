"""Mixed-precision training of a patch classifier (bfloat16 autocast on CPU, float16 on GPU)."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def leaves(n=288):
    g = torch.Generator().manual_seed(51)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.randn(n, 3, 8, 8, generator=g)
    x[torch.arange(n), y] += 0.8
    return TensorDataset(x, y)


class PatchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 4, stride=4)
        self.norm = nn.LayerNorm(24)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = h + self.mlp(self.norm(h))
        return self.head(h.mean(1))


def train_step(model, opt, scaler, x, y, device, dtype):
    with torch.autocast(device, dtype=dtype):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--init-scale", type=float, default=1024.0)
    args = ap.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    kind, dtype = ("cuda", torch.float16) if cuda else ("cpu", torch.bfloat16)
    torch.manual_seed(0)
    model = DDP(PatchNet().to(device))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scaler = torch.amp.GradScaler(kind, init_scale=args.init_scale, growth_interval=20)
    data = leaves()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            losses.append(train_step(model, opt, scaler, x.to(device), y.to(device), kind, dtype))
            scaler.update()
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f} scale {scaler.get_scale():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
