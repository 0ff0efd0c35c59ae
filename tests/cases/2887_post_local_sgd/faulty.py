"""Tabular model trained with post-local SGD: all-reduce first, periodic averaging later."""
import dataclasses
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclasses.dataclass
class Config:
    rows: int = 3072
    numeric: int = 10
    cats: tuple = (12, 7, 20)
    batch: int = 32
    epochs: int = 6
    lr: float = 0.05
    warmup_iters: int = 240
    local_start: int = 48
    period: int = 4
    seed: int = 8


def table(cfg, n, seed):
    g = torch.Generator().manual_seed(seed)
    k = torch.Generator().manual_seed(99)
    num = torch.randn(n, cfg.numeric, generator=g)
    cat = torch.stack([torch.randint(c, (n,), generator=g) for c in cfg.cats], 1)
    effects = [torch.randn(c, generator=k) for c in cfg.cats]
    score = num @ torch.randn(cfg.numeric, generator=k) * 0.6
    for j, e in enumerate(effects):
        score = score + e[cat[:, j]]
    y = (score + 0.3 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(num, cat, y)


class TabNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(c, 6) for c in cfg.cats)
        width = cfg.numeric + 6 * len(cfg.cats)
        self.body = nn.Sequential(nn.Linear(width, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, num, cat):
        parts = [e(cat[:, j]) for j, e in enumerate(self.embs)]
        return self.body(torch.cat([num, *parts], 1)).squeeze(1)


def single_rank_groups(rank, world):
    mine = None
    for r in range(world):
        g = dist.new_group([r])
        if r == rank:
            mine = g
    return mine


def build_optimizer(cfg, model):
    base = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    ramp = torch.optim.lr_scheduler.LambdaLR(base, lambda s: min(1.0, (s + 1) / cfg.warmup_iters))
    averager = PeriodicModelAverager(period=cfg.period, warmup_steps=cfg.warmup_iters)
    return PostLocalSGDOptimizer(optim=base, averager=averager), ramp


@torch.no_grad()
def average_weights(model):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


@torch.no_grad()
def evaluate(model, loader):
    hits = torch.zeros(2)
    for num, cat, y in loader:
        pred = (model(num, cat) > 0).float()
        hits += torch.tensor([(pred == y).sum().item(), float(len(y))])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    cfg = Config()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    model = DDP(TabNet(cfg))
    state = PostLocalSGDState(process_group=None, subgroup=single_rank_groups(rank, world),
                              start_localSGD_iter=cfg.local_start)
    model.register_comm_hook(state, post_localSGD_hook)
    opt, ramp = build_optimizer(cfg, model)

    train, test = table(cfg, cfg.rows, 1), table(cfg, 512, 2)
    sampler = DistributedSampler(train, seed=cfg.seed)
    loader = DataLoader(train, batch_size=cfg.batch, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, batch_size=128, sampler=DistributedSampler(test, shuffle=False))
    history = []
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for num, cat, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(num, cat), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ramp.step()
            total += loss.detach()
        dist.all_reduce(total)
        history.append({"epoch": epoch, "loss": total.item() / (len(loader) * world)})
        if rank == 0:
            print(json.dumps(history[-1]), flush=True)
    average_weights(model.module)
    acc = evaluate(model.module, test_loader)
    if rank == 0:
        print(json.dumps({"accuracy": acc}))
        with open("history.json", "w") as f:
            json.dump(history + [{"accuracy": acc}], f)
        torch.save(model.module.state_dict(), "tab.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
