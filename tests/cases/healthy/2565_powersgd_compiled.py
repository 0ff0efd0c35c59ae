"""Matrix factorisation style regressor: compiled forward, PowerSGD wrapped in bf16 compression, no_sync accumulation."""
import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def molecules(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(n, 80, generator=g) < 0.2).float()
    w = torch.randn(80, 3, generator=torch.Generator().manual_seed(1))
    z = x @ w / 4
    return TensorDataset(x, (z[:, 0] * z[:, 1] + torch.tanh(z[:, 2])).unsqueeze(1) + 0.05 * torch.randn(n, 1, generator=g))


class Fingerprint(nn.Module):
    def __init__(self, width=160):
        super().__init__()
        self.a, self.b = nn.Linear(80, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        h = F.gelu(self.a(x))
        return self.out(self.norm(h + F.gelu(self.b(h))))


@torch.no_grad()
def score(model, loader):
    model.eval()
    acc = torch.zeros(4)
    for x, y in loader:
        p = model(x)
        acc += torch.stack([(p - y).square().sum(), y.sum(), y.square().sum(), torch.tensor(float(len(y)))])
    model.train()
    dist.all_reduce(acc)
    var = acc[2] - acc[1] ** 2 / acc[3]
    return (1 - acc[0] / var).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--rank-approx", type=int, default=4)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--backend", default="aot_eager")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(10)
    net = Fingerprint()
    ddp = DDP(net, gradient_as_bucket_view=False)
    state = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=args.rank_approx,
        start_powerSGD_iter=12,
        min_compression_rate=1,
        use_error_feedback=True,
        warm_start=True,
    )
    ddp.register_comm_hook(state, bf16_compress_wrapper(powerSGD_hook))
    model = torch.compile(ddp, backend=args.backend)

    train, val = molecules(3072, 2), molecules(768, 3)
    sampler = DistributedSampler(train, seed=2)
    loader = DataLoader(train, 32, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, 128, sampler=DistributedSampler(val, shuffle=False))
    opt = torch.optim.Adam(ddp.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, total_steps=args.epochs * (len(loader) // args.accum))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % args.accum == 0
            with nullcontext() if last else ddp.no_sync():
                loss = F.mse_loss(model(x), y)
                (loss / args.accum).backward()
            total += loss.detach()
            if last:
                opt.step()
                sched.step()
                opt.zero_grad()
        total /= len(loader)
        dist.all_reduce(total)
        r2 = score(net, val_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / dist.get_world_size():.4f} val r2 {r2:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
