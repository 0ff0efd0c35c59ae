"""Second-order meta-learning; each process draws its own tasks, the outer gradient is averaged by hooks."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call


class Regressor(nn.Module):
    def __init__(self, h=40):
        super().__init__()
        self.l = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 1))

    def forward(self, x):
        return self.l(x)


class Tasks:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def draw(self, k=10):
        amp = 0.5 + 2.5 * torch.rand((), generator=self.g)
        ph = math.pi * torch.rand((), generator=self.g)
        x = torch.rand(2 * k, 1, generator=self.g) * 8 - 4
        y = amp * torch.sin(x + ph)
        return x[:k], y[:k], x[k:], y[k:]


def adapt(model, params, x, y, steps, lr, create_graph=True):
    for _ in range(steps):
        loss = (functional_call(model, params, (x,)) - y).pow(2).mean()
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
        params = {n: p - lr * g for (n, p), g in zip(params.items(), grads)}
    return params


class MetaLearner:
    def __init__(self, inner_lr=0.05, inner_steps=2, meta_bs=8):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(9)
        self.model = Regressor()
        self.inner_lr, self.inner_steps, self.meta_bs = inner_lr, inner_steps, meta_bs // self.world
        self.opt = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 250)
        self.tasks = Tasks(1000 + self.rank)
        self.pending = []
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(self._launch)

    def _launch(self, p):
        self.pending.append((p, dist.all_reduce(p.grad, async_op=True)))

    def meta_step(self):
        self.opt.zero_grad()
        base = dict(self.model.named_parameters())
        total = 0.0
        for _ in range(self.meta_bs):
            xs, ys, xq, yq = self.tasks.draw()
            fast = adapt(self.model, base, xs, ys, self.inner_steps, self.inner_lr)
            total = total + (functional_call(self.model, fast, (xq,)) - yq).pow(2).mean()
        loss = total / self.meta_bs
        loss.backward()
        for p, work in self.pending:
            work.wait()
            p.grad.div_(self.world)
        self.pending.clear()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.opt.step()
        self.sched.step()
        return loss.detach()

    def evaluate(self, n=40):
        bank = Tasks(5)
        tasks = [bank.draw() for _ in range(n)]
        stat = torch.zeros(3)
        params = {k: v.detach().requires_grad_() for k, v in self.model.named_parameters()}
        for xs, ys, xq, yq in tasks[self.rank::self.world]:
            before = (functional_call(self.model, params, (xq,)) - yq).pow(2).mean()
            fast = adapt(self.model, params, xs, ys, 5, self.inner_lr, create_graph=False)
            after = (functional_call(self.model, fast, (xq,)) - yq).pow(2).mean()
            stat += torch.tensor([before.item(), after.item(), 1.0])
        dist.all_reduce(stat)
        return (stat[0] / stat[2]).item(), (stat[1] / stat[2]).item()


def main():
    dist.init_process_group("gloo")
    ml = MetaLearner()
    run = torch.zeros(())
    for it in range(1, 251):
        run += ml.meta_step()
        if it % 50 == 0:
            dist.all_reduce(run)
            before, after = ml.evaluate()
            if ml.rank == 0:
                print(f"iter {it} meta loss {run.item() / 50 / ml.world:.4f} eval before {before:.3f} after {after:.3f}")
            run = torch.zeros(())
    if ml.rank == 0:
        torch.save(ml.model.state_dict(), "maml.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
