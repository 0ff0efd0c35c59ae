"""Gradient accumulation without DDP: one flat all-reduce per update, weights by sample count."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def flat_average(params, count):
    """Sum of per-sample gradients over all ranks divided by the number of samples of all ranks."""
    flat = torch.cat([p.grad.flatten() for p in params] + [torch.tensor([float(count)])])
    dist.all_reduce(flat)
    flat[:-1] /= flat[-1]
    offset = 0
    for p in params:
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--accum", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=10)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    g = torch.Generator().manual_seed(5)
    x = torch.randn(301, 7, generator=g)
    y = torch.tanh(x @ torch.randn(7, 1, generator=g)) + 0.05 * torch.randn(301, 1, generator=g)
    data = TensorDataset(x, y)

    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(7, 40), nn.ReLU(), nn.Linear(40, 1))
    params = list(net.parameters())
    for p in params:
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)

    for epoch in range(args.epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1000 + epoch)).tolist()
        mine = order[rank::world]
        updates = -(-len(order[0::world]) // (args.batch_size * args.accum))
        per_update = args.batch_size * args.accum
        total = torch.zeros(2)
        for u in range(updates):
            chunk = mine[u * per_update : (u + 1) * per_update]
            opt.zero_grad(set_to_none=False)
            if not all(p.grad is not None for p in params):
                for p in params:
                    p.grad = torch.zeros_like(p)
            for xb, yb in DataLoader(Subset(data, chunk), batch_size=args.batch_size):
                loss = nn.functional.mse_loss(net(xb), yb, reduction="sum")
                loss.backward()
                total += torch.tensor([loss.item(), float(len(yb))])
            flat_average(params, len(chunk))
            opt.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {(total[0] / total[1]).item():.4f} over {int(total[1])} samples", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
