"""No sampler is shared: each rank draws its own batches with replacement from the full data, for a number of steps."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Flow(nn.Module):
    """Velocity field of a flow-matching model."""

    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=150)
    ap.add_argument("--batch-size", type=int, default=32)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    g = torch.Generator().manual_seed(2)
    corner = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [0.0, -2.0]])
    data = TensorDataset(corner[torch.randint(0, 3, (500,), generator=g)] + 0.2 * torch.randn(500, 2, generator=g))

    own = torch.Generator().manual_seed(9000 + rank)
    draws = RandomSampler(data, replacement=True, num_samples=args.steps * args.batch_size, generator=own)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=draws)
    torch.manual_seed(0)
    model = DDP(Flow())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    noise = torch.Generator().manual_seed(31 + rank)
    window = torch.zeros(1)
    for step, (x1,) in enumerate(loader, start=1):
        x0 = torch.randn(x1.shape, generator=noise)
        t = torch.rand(len(x1), 1, generator=noise)
        loss = nn.functional.mse_loss(model((1 - t) * x0 + t * x1, t), x1 - x0)
        opt.zero_grad()
        loss.backward()
        opt.step()
        window += loss.detach()
        if step % 50 == 0:
            dist.all_reduce(window)
            if rank == 0:
                print(f"step {step}: loss {window.item() / world / 50:.4f}", flush=True)
            window.zero_()
    if rank == 0:
        torch.save(model.module.state_dict(), "flow.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
