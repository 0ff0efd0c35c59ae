"""First- and second-order MAML on sinusoids: fast weights by autograd.grad inside, outer gradient averaged over ranks by hand (coalesced)."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call


class SinusoidTasks:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def sample(self, k, q):
        amp = 0.5 + 2 * torch.rand(1, generator=self.g)
        phase = 3.14 * torch.rand(1, generator=self.g)
        x = 10 * torch.rand(k + q, 1, generator=self.g) - 5
        y = amp * torch.sin(x + phase)
        return x[:k], y[:k], x[k:], y[k:]


class Learner(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)


def adapt(learner, x, y, lr, steps, first_order):
    fast = dict(learner.named_parameters())
    for _ in range(steps):
        loss = nn.functional.mse_loss(functional_call(learner, fast, (x,)), y)
        grads = torch.autograd.grad(loss, list(fast.values()), create_graph=not first_order)
        fast = {n: p - lr * g for (n, p), g in zip(fast.items(), grads)}
    return fast


def average(params, world):
    grads = [p.grad for p in params]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= world
    for g, new in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        g.copy_(new)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--meta-iterations", type=int, default=60)
    ap.add_argument("--tasks", type=int, default=5)
    ap.add_argument("--inner-lr", type=float, default=0.02)
    ap.add_argument("--first-order-until", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    learner = Learner()
    with torch.no_grad():
        for p in learner.parameters():
            dist.broadcast(p, 0)
    opt = torch.optim.Adam(learner.parameters(), lr=3e-3)
    tasks, held_out = SinusoidTasks(100 + rank), SinusoidTasks(9)
    validation = [held_out.sample(10, 20) for _ in range(8)]
    for it in range(args.meta_iterations):
        opt.zero_grad()
        total = 0.0
        for _ in range(args.tasks):
            xs, ys, xq, yq = tasks.sample(10, 10)
            fast = adapt(learner, xs, ys, args.inner_lr, 1, it < args.first_order_until)
            loss = nn.functional.mse_loss(functional_call(learner, fast, (xq,)), yq) / args.tasks
            loss.backward()
            total += loss.item()
        average(list(learner.parameters()), world)
        nn.utils.clip_grad_norm_(learner.parameters(), 10.0)
        opt.step()
        if it % 15 == 0 or it == args.meta_iterations - 1:
            post = 0.0
            for xs, ys, xq, yq in validation[rank::world]:
                fast = adapt(learner, xs, ys, args.inner_lr, 3, True)
                with torch.no_grad():
                    post += nn.functional.mse_loss(functional_call(learner, fast, (xq,)), yq).item()
            stat = torch.tensor([total, post])
            dist.all_reduce(stat)
            if rank == 0:
                print(f"meta-iteration {it}: query loss {stat[0].item() / world:.3f}, validation after 3 steps {stat[1].item() / len(validation):.3f}")
    if rank == 0:
        torch.save(learner.state_dict(), os.path.join("/tmp", f"maml_{os.getpid()}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
