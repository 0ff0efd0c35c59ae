"""Logistic regression by L-BFGS on data that is split over the processes."""
import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(4)
    x = torch.randn(901, 30, generator=g, dtype=torch.float64)
    y = (x @ torch.randn(30, generator=g, dtype=torch.float64) + torch.randn(901, generator=g, dtype=torch.float64) > 0).double()
    n, x, y = len(x), x[rank::world], y[rank::world]

    torch.manual_seed(0)
    model = nn.Linear(30, 1).double()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5, history_size=8, line_search_fn="strong_wolfe")
    ridge = 1e-3
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        data_term = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y, reduction="sum") / n
        data_term.backward()
        value = data_term.detach().clone()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad += ridge * p.detach()
            value_reg = 0.5 * ridge * p.detach().pow(2).sum()
            value = value + value_reg / world
        dist.all_reduce(value)
        return value

    for outer in range(8):
        value = opt.step(closure)
        if rank == 0:
            print(f"outer {outer}: objective {value.item():.8f} after {calls} evaluations")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
