"""Ridge-like training with random features; heavy matmuls, so the number of threads matters."""
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def default_threads():
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@dataclass
class Runtime:
    threads: int = field(default_factory=default_threads)
    flush_denormal: bool = True

    def __enter__(self):
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        torch.set_flush_denormal(self.flush_denormal)
        return self

    def __exit__(self, *exc):
        torch.set_num_threads(self.before)
        torch.set_flush_denormal(False)


class RandomFeatures(nn.Module):
    def __init__(self, n_in, n_feat, n_out):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.register_buffer("w", torch.randn(n_in, n_feat, generator=g))
        self.register_buffer("b", torch.rand(n_feat, generator=g) * 6.283)
        self.out = nn.Linear(n_feat, n_out)

    def forward(self, x):
        return self.out(torch.cos(x @ self.w + self.b) * (2 / len(self.b)) ** 0.5)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DDP(RandomFeatures(20, 1500, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    gen = torch.Generator().manual_seed(60 + rank)
    with Runtime():
        for step in range(40):
            x = torch.randn(256, 20, generator=gen)
            y = torch.stack([x[:, 0].sin() * x[:, 1], x[:, 2:4].sum(1).cos()], 1)
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % 10 == 9:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"{step}: {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
