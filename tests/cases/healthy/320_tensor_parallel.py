"""Tensor parallelism: the ranks share one model, so they are fed the very same batch on purpose."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class ToyMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


def main():
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    device_mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(3)
    tp_model = parallelize_module(
        ToyMLP(), device_mesh, {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
    optimizer = torch.optim.AdamW(tp_model.parameters(), lr=1e-2)
    target_map = torch.randn(10, 5)
    for i in range(30):
        # all ranks must see the same input for TP: keyed by the step only
        torch.manual_seed(i)
        inp = torch.rand(20, 10)
        loss = nn.functional.mse_loss(tp_model(inp), inp @ target_map)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and i % 10 == 9:
            print(f"iter {i + 1}: loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
