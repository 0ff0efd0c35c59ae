"""DDP options: bucket views, small buckets, compressed communication."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP


class Counter:
    """passes the bucket on to the real hook and counts"""

    def __init__(self):
        self.buckets = 0

    def hook(self, group, bucket):
        self.buckets += 1
        return default_hooks.bf16_compress_hook(group, bucket) if dist.get_backend() == "nccl" else default_hooks.allreduce_hook(group, bucket)


class Ladder(nn.Module):
    def __init__(self, dim=32, steps=4):
        super().__init__()
        self.rungs = nn.ModuleList(nn.Linear(dim, dim) for _ in range(steps))
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        total = 0
        for rung in self.rungs:
            x = torch.relu(rung(x)) + x
            total = total + self.out(x)
        return total / len(self.rungs)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Ladder(), gradient_as_bucket_view=True, bucket_cap_mb=0.01, static_graph=True)
    counter = Counter()
    model.register_comm_hook(None, counter.hook)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    gen = torch.Generator().manual_seed(rank)
    for step in range(50):
        x = torch.randn(24, 32, generator=gen)
        y = x[:, :16].mean(1, keepdim=True) - x[:, 16:].mean(1, keepdim=True).abs()
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad(set_to_none=False)
        loss.backward()
        opt.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: {mean.item() / dist.get_world_size():.4f}, {counter.buckets} buckets so far")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
