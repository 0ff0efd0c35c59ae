"""Deep ensemble: each process trains its own members with torch.func; only predictions meet."""
import dataclasses
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap


@dataclasses.dataclass(frozen=True)
class Cfg:
    members_per_rank: int = 4
    epochs: int = 14
    batch: int = 50
    lr: float = 4e-3
    n: int = 1500


def mlp():
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 3.5 * r + y * 2.0944 + 0.15 * torch.randn(n, generator=g)
    return torch.stack([r * torch.cos(a), r * torch.sin(a)], 1) * 2, y


class AdamTree:
    """Adam over a dict of stacked tensors."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8):
        self.lr, self.betas, self.eps, self.t = lr, betas, eps, 0
        self.m = {k: torch.zeros_like(v) for k, v in params.items()}
        self.v = {k: torch.zeros_like(v) for k, v in params.items()}

    @torch.no_grad()
    def step(self, params, grads):
        self.t += 1
        b1, b2 = self.betas
        for k, g in grads.items():
            self.m[k].mul_(b1).add_(g, alpha=1 - b1)
            self.v[k].mul_(b2).addcmul_(g, g, value=1 - b2)
            mh, vh = self.m[k] / (1 - b1**self.t), self.v[k] / (1 - b2**self.t)
            params[k] -= self.lr * mh / (vh.sqrt() + self.eps)


class Ensemble:
    def __init__(self, cfg, rank):
        nets = []
        for i in range(cfg.members_per_rank):
            torch.manual_seed(rank * cfg.members_per_rank + i)
            nets.append(mlp())
        params, self.buffers = stack_module_state(nets)
        self.params = {k: v.detach() for k, v in params.items()}
        self.skeleton = mlp().to("meta")
        self.opt = AdamTree(self.params, cfg.lr)

        def loss(p, b, x, y):
            return nn.functional.cross_entropy(functional_call(self.skeleton, (p, b), (x,)), y)

        self.fwd = vmap(lambda p, b, x: functional_call(self.skeleton, (p, b), (x,)), in_dims=(0, 0, None))
        self.bwd = vmap(grad_and_value(loss), in_dims=(0, 0, 0, 0))

    def update(self, x, y):
        grads, losses = self.bwd(self.params, self.buffers, x, y)
        self.opt.step(self.params, grads)
        return losses

    def probs(self, x):
        with torch.no_grad():
            return self.fwd(self.params, self.buffers, x).softmax(-1)


def main():
    cfg = Cfg()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = spirals(cfg.n, 1)      # every member sees the whole set, in its own order
    xt, yt = spirals(600, 2)
    ens = Ensemble(cfg, rank)
    g = torch.Generator().manual_seed(10_000 + rank)
    m = cfg.members_per_rank
    for epoch in range(cfg.epochs):
        orders = torch.stack([torch.randperm(cfg.n, generator=g) for _ in range(m)])
        for cols in orders.split(cfg.batch, dim=1):
            losses = ens.update(x[cols], y[cols])
        if epoch % 3 == 2 or epoch == cfg.epochs - 1:
            p = ens.probs(xt)
            single = (p.argmax(-1) == yt).float().mean(1)
            pooled = p.sum(0)
            dist.all_reduce(pooled)
            pooled /= world * m
            nll = -pooled.gather(1, yt[:, None]).clamp_min(1e-9).log().mean()
            everyone = [torch.empty_like(single) for _ in range(world)]
            dist.all_gather(everyone, single)
            if rank == 0:
                print(f"epoch {epoch} loss {losses.mean():.4f} members {torch.cat(everyone).mean():.3f} "
                      f"pooled {(pooled.argmax(-1) == yt).float().mean():.3f} nll {nll:.4f}", flush=True)
    os.makedirs("members", exist_ok=True)
    torch.save(ens.params, f"members/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
