"""Tensor-parallel feed-forward network on a one-dimensional mesh: the group works on one batch together."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset, random_split


class Gated(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))


class Net(nn.Module):
    def __init__(self, n_in, dim, hidden, depth, n_out):
        super().__init__()
        self.stem = nn.Linear(n_in, dim)
        self.blocks = nn.ModuleList(Gated(dim, hidden) for _ in range(depth))
        self.head = nn.Linear(dim, n_out)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def shard(model, mesh):
    plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    for b in model.blocks:
        parallelize_module(b, mesh, plan)
    return model


def make_data(n=2400, n_in=14, n_out=5):
    g = torch.Generator().manual_seed(31)
    x = torch.randn(n, n_in, generator=g)
    w = torch.randn(n_in, n_out, generator=g)
    q = torch.randn(n_in, n_out, generator=g)
    return TensorDataset(x, (x @ w + (x * x) @ q * 0.5).argmax(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=60)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(4)  # every member of the group must see the same weights and the same batches
    model = shard(Net(14, 32, 128, 2, 5), mesh["tp"])
    train, test = random_split(make_data(), [2000, 400], generator=torch.Generator().manual_seed(0))
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(train, batch_size=args.batch, shuffle=True, generator=order)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    start = time.perf_counter()
    for epoch in range(args.epochs):
        total, seen, hits = 0.0, 0, 0
        for x, y in loader:
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(y)
            hits += (logits.argmax(1) == y).sum().item()
            seen += len(y)
        with torch.no_grad():
            ok = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(test, batch_size=200))
        if mesh.get_rank() == 0:
            print(f"epoch {epoch} loss {total / seen:.4f} acc {hits / seen:.3f} test {ok / len(test):.3f}", flush=True)
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    if mesh.get_rank() == 0:
        print(f"{local} parameters held here of {sum(p.numel() for p in model.parameters())}, {time.perf_counter() - start:.1f}s")
    full = {k: (v.full_tensor() if isinstance(v, DTensor) else v) for k, v in model.state_dict().items()}
    if mesh.get_rank() == 0:
        torch.save(full, "tp_full.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
