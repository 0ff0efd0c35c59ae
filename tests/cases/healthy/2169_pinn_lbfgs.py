"""Physics-informed network for u'' + pi^2 sin(pi x) = 0 on [-1, 1]; collocation points are split over the ranks, Adam then L-BFGS."""
import math
import time

import torch
import torch.distributed as dist
from torch import nn

POINTS, ADAM_STEPS, LBFGS_STEPS = 301, 150, 25
torch.set_default_dtype(torch.float64)


class Net(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        dims = [1] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.out(x)


class Problem:
    def __init__(self, rank, world):
        x = torch.linspace(-1, 1, POINTS)[:, None]
        self.x = x[rank::world].clone().requires_grad_(True)       # 151 and 150 points
        self.edges = torch.tensor([[-1.0], [1.0]])
        self.owns_edges = rank == world - 1

    def loss(self, net):
        """this rank's share of the global objective: the shares add up, nothing is averaged afterwards"""
        u = net(self.x)
        (du,) = torch.autograd.grad(u.sum(), self.x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), self.x, create_graph=True)
        residual = ddu + math.pi ** 2 * torch.sin(math.pi * self.x)
        share = residual.pow(2).sum() / POINTS
        if self.owns_edges:
            share = share + 10 * net(self.edges).pow(2).mean()
        return share


def sync(net, value):
    """one flat message: all gradients and the loss"""
    # the last bias drops out of u'', so only the rank with the edges has a gradient for it; the message is alike on all
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    flat = torch.cat([g.reshape(-1) for g in grads] + [value.detach().reshape(1)])
    dist.all_reduce(flat)
    offset = 0
    for p in net.parameters():
        p.grad = flat[offset:offset + p.numel()].view_as(p).clone()
        offset += p.numel()
    return flat[-1].clone()


@torch.no_grad()
def error(net):
    x = torch.linspace(-1, 1, 501)[:, None]
    return (net(x) - torch.sin(math.pi * x)).abs().max().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = Net()
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    problem, calls, start = Problem(rank, world), 0, time.time()

    def evaluate(optimizer):
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        share = problem.loss(net)
        share.backward()
        return sync(net, share)

    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(ADAM_STEPS):
        value = evaluate(adam)
        adam.step()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"adam {step + 1:4d} loss {value:.3e} error {error(net):.2e}", flush=True)

    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=10, history_size=20, line_search_fn="strong_wolfe")
    history = []
    for step in range(LBFGS_STEPS):
        # every rank sees the same loss and the same gradient, so the line search takes the same number of calls everywhere
        history.append(lbfgs.step(lambda: evaluate(lbfgs)).item())
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"lbfgs {step + 1:3d} loss {history[-1]:.3e} error {error(net):.2e} calls {calls}", flush=True)
        if len(history) > 3 and history[-4] - history[-1] < 1e-9:
            break

    digest = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    low, high = digest.clone(), digest.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"spread over ranks {(high - low).max():.1e}, {time.time() - start:.1f}s")
        torch.save(net.state_dict(), "pinn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
