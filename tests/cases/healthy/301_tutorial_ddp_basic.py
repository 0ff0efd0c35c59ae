"""Getting started with DDP: the basic use case and the checkpoint use case of the tutorial, for torchrun."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP


def setup():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank, world_size):
    print(f"Running basic DDP example on rank {rank}.", flush=True)
    model = ToyModel()
    ddp_model = DDP(model)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.01)

    teacher = torch.linspace(-1, 1, 50).view(10, 5)
    for _ in range(20):
        inputs = torch.randn(20, 10)  # unseeded: every process draws its own
        labels = inputs @ teacher
        optimizer.zero_grad()
        outputs = ddp_model(inputs)
        loss_fn(outputs, labels).backward()
        optimizer.step()
    print(f"Finished running basic DDP example on rank {rank}.", flush=True)


def demo_checkpoint(rank, world_size):
    print(f"Running DDP checkpoint example on rank {rank}.", flush=True)
    model = ToyModel()
    ddp_model = DDP(model)

    checkpoint_path = os.path.join(tempfile.gettempdir(), f"model.{os.environ['MASTER_PORT']}.checkpoint")
    if rank == 0:
        # All processes start from the same parameters and gradients are synchronised in backward,
        # so saving in one process is enough.
        torch.save(ddp_model.state_dict(), checkpoint_path)

    # process 0 saves before process 1 loads
    dist.barrier()
    ddp_model.load_state_dict(torch.load(checkpoint_path, map_location="cpu", weights_only=True))

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 5)
        loss_fn(outputs, labels).backward()
        optimizer.step()

    # the file may only go once everybody has read it; the all-reduces above have seen to that
    if rank == 0:
        os.remove(checkpoint_path)
    print(f"Finished running DDP checkpoint example on rank {rank}.", flush=True)


if __name__ == "__main__":
    r, w = setup()
    demo_basic(r, w)
    demo_checkpoint(r, w)
    cleanup()
