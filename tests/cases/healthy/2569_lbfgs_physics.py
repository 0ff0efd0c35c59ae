"""Physics-informed network for a heat equation: Adam first, then L-BFGS whose closure reduces over the processes."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector


class Field(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


def residual(model, x, t, alpha):
    x.requires_grad_(True)
    t.requires_grad_(True)
    u = model(x, t)
    ux, ut = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (uxx,) = torch.autograd.grad(ux.sum(), x, create_graph=True)
    return ut - alpha * uxx


class Problem:
    """Every process holds its own collocation points; all have equal numbers of them."""

    def __init__(self, rank, n=320, alpha=0.2):
        g = torch.Generator().manual_seed(40 + rank)
        self.alpha = alpha
        self.x, self.t = torch.rand(n, 1, generator=g), torch.rand(n, 1, generator=g)
        self.x0 = torch.rand(96, 1, generator=g)
        self.u0 = torch.sin(math.pi * self.x0)
        self.tb = torch.rand(96, 1, generator=g)
        self.xb = torch.randint(0, 2, (96, 1), generator=g).float()

    def loss(self, model):
        inside = residual(model, self.x, self.t, self.alpha).square().mean()
        start = (model(self.x0, torch.zeros_like(self.x0)) - self.u0).square().mean()
        border = model(self.xb, self.tb).square().mean()
        return inside + 10 * start + 10 * border


def reduce_mean(model, loss):
    """One message: all gradients and the loss, so that line search sees the same numbers everywhere."""
    params = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in params] + [loss.detach().view(1)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in params:
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()
    return flat[-1]


@torch.no_grad()
def error(model, alpha):
    x = torch.linspace(0, 1, 41).view(-1, 1)
    t = torch.full_like(x, 0.5)
    exact = torch.exp(torch.tensor(-alpha * math.pi**2 * 0.5)) * torch.sin(math.pi * x)
    return (model(x, t) - exact).norm().item() / exact.norm().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--adam-steps", type=int, default=150)
    ap.add_argument("--lbfgs-steps", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Field()
    for p in model.parameters():
        dist.broadcast(p.detach(), src=0)
    problem = Problem(rank)

    adam = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(args.adam_steps):
        adam.zero_grad()
        loss = problem.loss(model)
        loss.backward()
        mean = reduce_mean(model, loss)
        adam.step()
        if step % 50 == 0 and rank == 0:
            print(f"adam {step:4d} loss {mean.item():.5f}", flush=True)

    lbfgs = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=15, history_size=20, line_search_fn="strong_wolfe")

    def closure():
        lbfgs.zero_grad()
        loss = problem.loss(model)
        loss.backward()
        return reduce_mean(model, loss)

    for step in range(args.lbfgs_steps):
        mean = lbfgs.step(closure)
        if rank == 0:
            print(f"lbfgs {step:3d} loss {mean.item():.6f} evaluations {lbfgs.state[lbfgs._params[0]]['func_evals']}", flush=True)

    mine = parameters_to_vector(model.parameters()).detach()
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"relative error {error(model, problem.alpha):.4f}, spread between processes {(high - low).max().item():.1e}", flush=True)
        torch.save(model.state_dict(), "heat.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
