"""Sharpness-aware minimisation as an optimizer subclass with a closure."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["before"] = p.detach().clone()
                    p.add_(p.grad * scale)

    @torch.no_grad()
    def descend(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["before"])
        self.base.step()

    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.climb()
        closure()
        self.descend()
        return loss


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    g = torch.Generator().manual_seed(0)
    x = torch.randn(480, 6, generator=g)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 24, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 2)))
    opt = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for xb, yb in loader:

            def closure():
                opt.zero_grad()
                loss = nn.functional.cross_entropy(model(xb), yb)
                loss.backward()
                return loss

            total += torch.tensor([opt.step(closure).item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
