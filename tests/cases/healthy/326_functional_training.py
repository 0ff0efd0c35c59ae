"""torch.func style: parameters are a dict, gradients come from grad_and_value, the all-reduce is ours."""
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad_and_value


def tree_map(f, *trees):
    return {k: f(*(t[k] for t in trees)) for k in trees[0]}


def pmean(tree, world):
    """mean over the ranks of every leaf, one collective for all of them"""
    keys = sorted(tree)
    flat = torch.cat([tree[k].reshape(-1) for k in keys])
    dist.all_reduce(flat)
    parts = (flat / world).split([tree[k].numel() for k in keys])
    return {k: p.view_as(tree[k]) for k, p in zip(keys, parts)}


def adam_init(params):
    return dict(m=tree_map(torch.zeros_like, params), v=tree_map(torch.zeros_like, params), t=0)


def adam_update(grads, state, params, lr=4e-3, b1=0.9, b2=0.999, eps=1e-8):
    t = state["t"] + 1
    m = tree_map(lambda a, g: b1 * a + (1 - b1) * g, state["m"], grads)
    v = tree_map(lambda a, g: b2 * a + (1 - b2) * g * g, state["v"], grads)
    new = tree_map(lambda p, a, b: p - lr * (a / (1 - b1**t)) / ((b / (1 - b2**t)).sqrt() + eps), params, m, v)
    return new, dict(m=m, v=v, t=t)


def loss_fn(net, params, x, y):
    return nn.functional.mse_loss(functional_call(net, params, (x,)), y)


def sample_batch(step, rank, n=32):
    g = torch.Generator().manual_seed(step * 1009 + rank)
    x = torch.rand(n, 2, generator=g) * 4 - 2
    return x, torch.exp(-(x**2).sum(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)  # one key, one initial dict for everybody
    net = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 1))
    params = {k: v.detach().clone() for k, v in net.named_parameters()}
    opt_state = adam_init(params)
    step_fn = grad_and_value(partial(loss_fn, net))
    for step in range(50):
        x, y = sample_batch(step, rank)
        grads, loss = step_fn(params, x, y)
        out = pmean({**grads, "~loss": loss}, world)
        loss = out.pop("~loss")
        params, opt_state = adam_update(out, opt_state, params)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
