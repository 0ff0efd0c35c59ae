"""Warm start of a compiled+wrapped model from a plain checkpoint: keys get `module._orig_mod.` put in front, strict=False, then the result is checked."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ResMLP(nn.Module):
    def __init__(self, d=24, n=3, out=3):
        super().__init__()
        self.inp = nn.Linear(8, d)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU(), nn.Linear(d, d)) for _ in range(n))
        self.out = nn.Linear(d, out)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = h + b(h)
        return self.out(h)


def strip(sd, prefixes=("module.", "_orig_mod.")):
    out = {}
    for k, v in sd.items():
        changed = True
        while changed:
            changed = False
            for p in prefixes:
                if k.startswith(p):
                    k, changed = k[len(p):], True
        out[k] = v
    return out


def fit(net, ds, epochs, lr, seed):
    smp = DistributedSampler(ds, seed=seed)
    dl = DataLoader(ds, 24, sampler=smp)
    opt = torch.optim.AdamW(net.parameters(), lr)
    for e in range(epochs):
        smp.set_epoch(e)
        for x, y in dl:
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad(); loss.backward(); opt.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(2)
    x = torch.randn(384, 8, generator=g)
    ds = TensorDataset(x, (x @ torch.randn(8, 3, generator=g)).argmax(1))
    torch.manual_seed(0)
    first = DDP(torch.compile(ResMLP(), backend="eager"))
    a = fit(first, ds, 3, 3e-3, 0)
    box = [os.path.join(tempfile.gettempdir(), f"warm771_{os.getpid()}.pt")]
    dist.broadcast_object_list(box, 0)
    if rank == 0:
        torch.save(strip(first.state_dict()), box[0])
    dist.barrier()

    second = DDP(torch.compile(ResMLP(), backend="eager"))
    plain = torch.load(box[0], map_location="cpu", weights_only=True)
    missing, unexpected = second.load_state_dict({"module._orig_mod." + k: v for k, v in plain.items()}, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    b = fit(second, ds, 2, 1e-3, 100)                # warm start: new optimizer, smaller lr, on purpose
    if rank == 0:
        print(f"first {a:.3f}, warm-started {b:.3f}")
    dist.barrier()
    if rank == 0:
        os.remove(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
