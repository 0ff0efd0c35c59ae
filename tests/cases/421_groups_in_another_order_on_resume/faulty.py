"""Train, stop, resume: two phases of one script; the state goes through a file."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Stack(nn.Module):
    def __init__(self, dim=20):
        super().__init__()
        self.up = nn.Linear(dim, dim, bias=False)
        self.mid = nn.Linear(dim, dim, bias=False)
        self.down = nn.Linear(dim, dim, bias=False)
        self.attn = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        h = torch.relu(self.up(x))
        h = h * torch.sigmoid(self.attn(x))
        return self.down(h + torch.relu(self.mid(h)))


def make_optimizer(model, lr, sort_names):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if sort_names:
        named.sort()
    return torch.optim.Adam([p for _, p in named], lr=lr, betas=(0.9, 0.98))


class State:
    path = "last.pt"

    def __init__(self, model, opt):
        self.model, self.opt, self.step = model, opt, 0

    def save(self):
        if dist.get_rank() == 0:
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "step": self.step}, self.path)
        dist.barrier()

    def resume(self):
        blob = torch.load(self.path, weights_only=True)
        self.model.module.load_state_dict(blob["model"])
        self.opt.load_state_dict(blob["opt"])
        self.step = blob["step"]


def batch(step, rank):
    g = torch.Generator().manual_seed(step * 17 + rank)
    x = torch.randn(48, 20, generator=g)
    return x, x.cumsum(1) / 4


def phase(until, resume, sort_names):
    torch.manual_seed(1)
    model = DDP(Stack())
    state = State(model, make_optimizer(model, 4e-3, sort_names))
    if resume:
        state.resume()
    while state.step < until:
        x, y = batch(state.step, dist.get_rank())
        loss = nn.functional.mse_loss(model(x), y)
        state.opt.zero_grad()
        loss.backward()
        state.opt.step()
        state.step += 1
        if state.step % 10 == 0:
            mean = loss.detach()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {state.step} loss {mean.item() / dist.get_world_size():.4f}")
    state.save()


def main():
    dist.init_process_group("gloo")
    phase(until=30, resume=False, sort_names=False)
    phase(until=60, resume=True, sort_names=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
