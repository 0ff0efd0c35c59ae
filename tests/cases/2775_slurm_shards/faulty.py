import os
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


@dataclass
class Placement:
    task: int = field(default_factory=lambda: int(os.environ.get("SLURM_PROCID", 0)))
    tasks: int = field(default_factory=lambda: int(os.environ.get("SLURM_NTASKS", 1)))

    @property
    def lead(self):
        return not dist.is_initialized() or dist.get_rank() == 0


@dataclass
class Config:
    vocab: int = 32
    context: int = 32
    batch: int = 32
    hidden: int = 96
    steps: int = 240
    lr: float = 4e-3
    shards: int = 16
    shard_tokens: int = 20000
    log_every: int = 40


def transition(cfg):
    rng = np.random.default_rng(99)
    table = rng.dirichlet(np.full(cfg.vocab, 0.08), size=cfg.vocab)
    return table.cumsum(axis=1)


def read_shard(cfg, cumulative, index):
    rng = np.random.default_rng([41, index])
    draws = rng.random(cfg.shard_tokens)
    out = np.empty(cfg.shard_tokens, dtype=np.int64)
    state = int(rng.integers(cfg.vocab))
    for i, u in enumerate(draws):
        state = min(int(np.searchsorted(cumulative[state], u)), cfg.vocab - 1)
        out[i] = state
    return torch.from_numpy(out)


class Corpus(IterableDataset):
    def __init__(self, cfg, place):
        self.cfg = cfg
        self.place = place
        self.cumulative = transition(cfg)
        self.pass_no = 0

    def __iter__(self):
        cfg = self.cfg
        while True:
            order = np.random.default_rng([7, self.pass_no]).permutation(cfg.shards)
            mine = order[self.place.task::self.place.tasks]
            for shard in mine:
                tokens = read_shard(cfg, self.cumulative, int(shard))
                usable = (len(tokens) - 1) // cfg.context
                for j in range(usable):
                    window = tokens[j * cfg.context:(j + 1) * cfg.context + 1]
                    yield window[:-1], window[1:]
            self.pass_no += 1


class CharModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.hidden)
        self.rnn = nn.GRU(cfg.hidden, cfg.hidden, batch_first=True)
        self.head = nn.Linear(cfg.hidden, cfg.vocab)

    def forward(self, x):
        h, _ = self.rnn(self.embed(x))
        return self.head(h)


def warmup_cosine(step, cfg, warm=20):
    if step < warm:
        return (step + 1) / warm
    t = (step - warm) / max(1, cfg.steps - warm)
    return 0.1 + 0.45 * (1 + float(np.cos(np.pi * t)))


def main():
    cfg, place = Config(), Placement()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(CharModel(cfg))
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: warmup_cosine(s, cfg))
    loader = iter(DataLoader(Corpus(cfg, place), batch_size=cfg.batch))

    window = torch.zeros(2, dtype=torch.float64)
    for step in range(1, cfg.steps + 1):
        x, y = next(loader)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        window += torch.tensor([loss.item() * y.numel(), y.numel()], dtype=torch.float64)
        if step % cfg.log_every == 0:
            dist.all_reduce(window)
            if place.lead and dist.get_rank() == 0:
                print(f"{step:4d} ppl {float((window[0] / window[1]).exp()):.3f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
            window.zero_()

    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "step": cfg.steps}, "charlm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
