"""MAML on sine regression: every rank has its own tasks, meta-gradients are averaged, adaptation stays local."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))

    def forward(self, x):
        return self.net(x)


class Tasks:
    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def u(self, *shape):
        return torch.rand(*shape, generator=self.gen)

    def draw(self, shots, queries):
        amp, phase = 0.5 + 4.0 * self.u(1), 3.14 * self.u(1)
        x = self.u(shots + queries, 1) * 10 - 5
        y = amp * torch.sin(x + phase)
        return (x[:shots], y[:shots]), (x[shots:], y[shots:])


def adapt(model, weights, support, lr, steps, create_graph):
    x, y = support
    for _ in range(steps):
        loss = F.mse_loss(functional_call(model, weights, (x,)), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=create_graph)
        weights = {k: w - lr * g for (k, w), g in zip(weights.items(), grads)}
    return weights


def meta_batch_loss(model, tasks, args):
    total = 0.0
    for _ in range(args.meta_batch):
        support, (xq, yq) = tasks.draw(args.shots, args.queries)
        fast = adapt(model, dict(model.named_parameters()), support, args.inner_lr, args.inner_steps, True)
        total = total + F.mse_loss(functional_call(model, fast, (xq,)), yq)
    return total / args.meta_batch


def meta_test(model, rank, world, args, n=100):
    """Adaptation needs gradients, so no no_grad here; the meta weights themselves are left alone."""
    tasks = Tasks(seed=5000 + rank)
    stat = torch.zeros(3)
    for _ in range(n // world):
        support, (xq, yq) = tasks.draw(args.shots, args.queries)
        start = {k: p.detach().clone().requires_grad_(True) for k, p in model.named_parameters()}
        before = F.mse_loss(functional_call(model, start, (xq,)), yq).item()
        fast = adapt(model, start, support, args.inner_lr, 5, False)
        after = F.mse_loss(functional_call(model, fast, (xq,)), yq).item()
        stat += torch.tensor([before, after, 1.0])
    dist.all_reduce(stat)
    return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=500)
    ap.add_argument("--meta_batch", type=int, default=4)
    ap.add_argument("--shots", type=int, default=10)
    ap.add_argument("--queries", type=int, default=10)
    ap.add_argument("--inner_lr", type=float, default=0.02)
    ap.add_argument("--inner_steps", type=int, default=1)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(23)
    model = Learner()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    tasks = Tasks(seed=100 + rank)
    smooth = None
    for it in range(args.iters):
        loss = meta_batch_loss(model, tasks, args)
        opt.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()] + [loss.detach().reshape(1)])
        dist.all_reduce(flat)
        flat /= world
        at = 0
        for p in model.parameters():
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        opt.step()
        mean = flat[-1].item()
        smooth = mean if smooth is None else 0.95 * smooth + 0.05 * mean
        if rank == 0 and it % 100 == 99:
            print(f"iter {it + 1} query loss after one step {smooth:.3f}", flush=True)

    before, after = meta_test(model, rank, world, args)
    if rank == 0:
        print(f"new tasks: mse before adaptation {before:.3f}, after five steps {after:.3f}")
        torch.save(model.state_dict(), "maml.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
