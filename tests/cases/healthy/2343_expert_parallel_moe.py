"""Switch-style mixture of experts: one expert per rank, tokens exchanged with all-to-all."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


@dataclass
class Cfg:
    dim: int = 32
    hidden: int = 64
    feats: int = 12
    classes: int = 5
    tokens: int = 128
    steps: int = 500
    lr: float = 3e-3
    capacity: float = 1.5
    aux: float = 0.02


class Exchange(torch.autograd.Function):
    """Row block i of the input goes to rank i. The exchange is its own transpose."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


class MoE(nn.Module):
    def __init__(self, cfg, expert):
        super().__init__()
        self.n_experts = dist.get_world_size()
        self.capacity = int(cfg.capacity * cfg.tokens / self.n_experts)
        self.gate = nn.Linear(cfg.dim, self.n_experts, bias=False)
        self.expert = expert

    def forward(self, h):
        probs = self.gate(h).softmax(-1)
        weight, choice = probs.max(-1)
        onehot = F.one_hot(choice, self.n_experts)
        slot = (onehot.cumsum(0) * onehot).sum(-1) - 1
        kept = slot < self.capacity
        rows = choice[kept] * self.capacity + slot[kept]
        buf = h.new_zeros(self.n_experts * self.capacity, h.shape[1])
        buf = buf.index_copy(0, rows, h[kept])
        back = Exchange.apply(self.expert(Exchange.apply(buf)))
        out = torch.zeros_like(h).index_copy(0, kept.nonzero().squeeze(1), back[rows] * weight[kept, None])
        aux = self.n_experts * (onehot.float().mean(0) * probs.mean(0)).sum()
        return h + out, aux, 1 - kept.float().mean()


class Net(nn.Module):
    def __init__(self, cfg, expert):
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(cfg.feats, cfg.dim), nn.GELU(), nn.LayerNorm(cfg.dim))
        self.moe = MoE(cfg, expert)
        self.out = nn.Sequential(nn.LayerNorm(cfg.dim), nn.Linear(cfg.dim, cfg.classes))

    def forward(self, x):
        h, aux, dropped = self.moe(self.inp(x))
        return self.out(h), aux, dropped


class Source:
    def __init__(self, cfg, seed):
        t = torch.Generator().manual_seed(4)
        self.a = torch.randn(2, cfg.feats - 1, cfg.classes, generator=t)
        self.g = torch.Generator().manual_seed(seed)
        self.cfg = cfg

    def draw(self):
        n = self.cfg.tokens
        x = torch.randn(n, self.cfg.feats, generator=self.g)
        domain = (x[:, 0] > 0).long()
        y = torch.einsum("nf,nfc->nc", x[:, 1:], self.a[domain]).argmax(1)
        return x, y


def sync_gradients(model, world):
    for name, p in model.named_parameters():
        if ".expert." in name:
            p.grad /= world           # already summed over all ranks' tokens by the exchange
        else:
            dist.all_reduce(p.grad)
            p.grad /= world


@torch.no_grad()
def evaluate(model, cfg, rank, rounds=8):
    model.eval()
    src = Source(cfg, 5000 + rank)
    stat = torch.zeros(2)
    for _ in range(rounds):
        x, y = src.draw()
        stat[0] += (model(x)[0].argmax(1) == y).sum()
        stat[1] += len(y)
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    cfg = Cfg(steps=int(os.environ.get("STEPS", 500)))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(100 + rank)
    expert = nn.Sequential(nn.Linear(cfg.dim, cfg.hidden), nn.GELU(), nn.Linear(cfg.hidden, cfg.dim))
    torch.manual_seed(0)
    model = Net(cfg, expert)

    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    src = Source(cfg, 10 + rank)
    for step in range(cfg.steps):
        x, y = src.draw()
        logits, aux, dropped = model(x)
        ce = F.cross_entropy(logits, y)
        opt.zero_grad()
        (ce + cfg.aux * aux).backward()
        sync_gradients(model, world)
        opt.step()
        if step % 100 == 0:
            log = torch.stack([ce.detach(), aux.detach(), dropped]) / world
            dist.all_reduce(log)
            if rank == 0:
                print(f"step {step:4d} ce {log[0]:.3f} balance {log[1]:.3f} dropped {log[2]:.3f}", flush=True)

    acc = evaluate(model, cfg, rank)
    if rank == 0:
        print(f"accuracy {acc:.3f}")
    torch.save(expert.state_dict(), f"expert_{rank}.pt")
    if rank == 0:
        torch.save({k: v for k, v in model.state_dict().items() if ".expert." not in k}, "shared.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
