"""DiLoCo: inner AdamW on every worker, Nesterov momentum on the averaged parameter change every H steps."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    rounds: int = 14
    inner_steps: int = 12
    batch: int = 24
    seq: int = 20
    vocab: int = 24
    dim: int = 40
    inner_lr: float = 3e-3
    outer_lr: float = 0.7
    outer_momentum: float = 0.6


class TinyLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.rnn = nn.GRU(cfg.dim, cfg.dim, batch_first=True)
        self.out = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])


class MarkovText:
    def __init__(self, cfg, seed):
        self.cfg = cfg
        table = torch.randn(cfg.vocab, cfg.vocab, generator=torch.Generator().manual_seed(4))
        self.table = (3 * table).softmax(-1)  # one language for all
        self.gen = torch.Generator().manual_seed(seed)

    def batch(self):
        rows = [torch.randint(self.cfg.vocab, (self.cfg.batch,), generator=self.gen)]
        for _ in range(self.cfg.seq):
            rows.append(torch.multinomial(self.table[rows[-1]], 1, generator=self.gen).squeeze(-1))
        seq = torch.stack(rows, 1)
        return seq[:, :-1], seq[:, 1:]


def lm_loss(model, tokens, target):
    return F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())


class OuterOptimizer:
    """Keeps the last agreed weights; identical on every rank because it only sees reduced numbers."""

    def __init__(self, model, cfg):
        self.model = model
        self.anchor = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.sgd = torch.optim.SGD(self.anchor, lr=cfg.outer_lr, momentum=cfg.outer_momentum, nesterov=True)

    @torch.no_grad()
    def step(self):
        world = dist.get_world_size()
        for agreed, local in zip(self.anchor, self.model.parameters()):
            delta = agreed - local
            dist.all_reduce(delta)
            agreed.grad = delta / world
        self.sgd.step()
        self.sgd.zero_grad()
        for agreed, local in zip(self.anchor, self.model.parameters()):
            local.copy_(agreed)


@torch.no_grad()
def validate(model, cfg):
    model.eval()
    text = MarkovText(cfg, seed=12345)
    value = sum(lm_loss(model, *text.batch()).item() for _ in range(4)) / 4
    model.train()
    return value


def main():
    cfg = Config()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = TinyLM(cfg)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    inner = torch.optim.AdamW(model.parameters(), lr=cfg.inner_lr, weight_decay=0.01)
    outer = OuterOptimizer(model, cfg)
    text = MarkovText(cfg, seed=50 + rank)

    for rnd in range(cfg.rounds):
        # the inner moments stay with the worker, only parameters are exchanged
        for _ in range(cfg.inner_steps):
            loss = lm_loss(model, *text.batch())
            inner.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
        outer.step()
        if rank == 0 and rnd % 2 == 1:
            print(f"round {rnd}: local loss {loss.item():.4f} validation {validate(model, cfg):.4f}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "diloco.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
