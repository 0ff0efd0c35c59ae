"""A next-token model of modular sequences, its wide layers split over the ranks by DTensor; batches are drawn, not loaded."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY = 32


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextToken(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 2 * width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def split(model: NextToken, mesh: DeviceMesh) -> NextToken:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


class Sequences:
    """Endless batches: a start and a stride decide each sequence."""

    def __init__(self, seed: int, batch_size: int, length: int = 16) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.batch_size, self.length = batch_size, length

    def __iter__(self):
        while True:
            start = torch.randint(0, VOCABULARY, (self.batch_size, 1), generator=self.generator)
            stride = torch.randint(1, 4, (self.batch_size, 1), generator=self.generator)
            tokens = (start + stride * torch.arange(self.length + 1)) % VOCABULARY
            yield tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = split(NextToken(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = iter(Sequences(seed=5, batch_size=args.batch_size))
    for step in range(args.steps):
        tokens, targets = next(batches)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 30 == 29:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
