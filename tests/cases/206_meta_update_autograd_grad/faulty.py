"""MAML on sine waves; tasks are spread over the ranks, the outer update is written out by hand."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP

INNER_LR, OUTER_LR, TASKS, SHOTS, ITERATIONS = 0.05, 0.02, 4, 10, 30


def sample_task(gen):
    amplitude = 0.5 + 2 * torch.rand(1, generator=gen)
    phase = math.pi * torch.rand(1, generator=gen)
    def draw():
        x = 6 * torch.rand(SHOTS, 1, generator=gen) - 3
        return x, amplitude * torch.sin(x + phase)
    return draw(), draw()


def adapt(net, params, support):
    x, y = support
    loss = nn.functional.mse_loss(functional_call(net, params, (x,)), y)
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    return {k: p - INNER_LR * g for (k, p), g in zip(params.items(), grads)}


def outer_loss(net, gen):
    params = dict(net.named_parameters())
    losses = []
    for _ in range(TASKS):
        support, query = sample_task(gen)
        fast = adapt(net, params, support)
        losses.append(nn.functional.mse_loss(functional_call(net, fast, (query[0],)), query[1]))
    return torch.stack(losses).mean()


def apply_update(params, grads, world):
    with torch.no_grad():
        for p, g in zip(params, grads):
            p.sub_(OUTER_LR * g)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)))
    net = model.module
    gen = torch.Generator().manual_seed(1000 + rank)  # other tasks on every rank
    window = torch.zeros(2)
    for it in range(ITERATIONS):
        loss = outer_loss(net, gen)
        params = list(model.parameters())
        grads = [g.contiguous() for g in torch.autograd.grad(loss, params)]
        apply_update(params, grads, world)
        window += torch.tensor([loss.item(), 1.0])
        if (it + 1) % 10 == 0:
            dist.all_reduce(window)
            if rank == 0:
                print(f"iteration {it + 1}: query loss {(window[0] / window[1]).item():.4f}")
            window.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
