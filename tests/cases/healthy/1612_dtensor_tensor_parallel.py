"""Tensor parallelism only: the same batch goes to both ranks, the wide layers are split.

Column-wise/row-wise parallel MLP blocks by parallelize_module. There is no data-parallel dimension,
so feeding identical data to the two ranks is what must happen, and the replicated parameters stay
equal without any gradient all-reduce.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, h)
        self.down = nn.Linear(h, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d_in=12, d=32, h=96, classes=5):
        super().__init__()
        self.inp = nn.Linear(d_in, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(3))
        self.out = nn.Linear(d, classes)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x)


def make_data():
    g = torch.Generator().manual_seed(3)
    centre = torch.randn(5, 12, generator=g) * 1.6
    y = torch.randint(5, (1600,), generator=g)
    x = centre[y] + torch.randn(1600, 12, generator=g)
    x = torch.cat([x[:, :6], torch.sin(x[:, 6:])], dim=1)
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    (xtr, ytr), (xte, yte) = make_data()
    mean, std = xtr.mean(0), xtr.std(0)
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    torch.manual_seed(11)
    net = Net()
    plan = {}
    for i in range(3):
        plan[f"blocks.{i}.up"] = ColwiseParallel()
        plan[f"blocks.{i}.down"] = RowwiseParallel()
    parallelize_module(net, mesh["tp"], plan)

    # One generator, equally seeded on each rank: all members of the TP group see one batch order.
    gen = torch.Generator().manual_seed(21)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True, generator=gen)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3, foreach=False)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=3, gamma=0.5)
    for epoch in range(6):
        net.train()
        total = 0.0
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            total += loss.item() * len(x)
        sched.step()
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(xtr):.4f}", flush=True)

    net.eval()
    with torch.no_grad():
        acc = (net(xte).argmax(1) == yte).float().mean().item()
    for name, p in net.named_parameters():
        if not isinstance(p, DTensor):
            lo, hi = p.detach().clone(), p.detach().clone()
            dist.all_reduce(lo, op=dist.ReduceOp.MIN)
            dist.all_reduce(hi, op=dist.ReduceOp.MAX)
            assert torch.allclose(lo, hi, atol=1e-5), name
    shards = {k: (v.to_local() if isinstance(v, DTensor) else v) for k, v in net.state_dict().items()}
    torch.save(shards, f"tp_shard_{rank}.pt")
    if rank == 0:
        print(f"test accuracy {acc:.3f}")
    assert acc > 0.8
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
