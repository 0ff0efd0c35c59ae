import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sequences(Dataset):
    """Which of four motifs is hidden in a noisy series?"""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(31)
        motif = torch.randn(4, 10, generator=g) * 1.5
        g.manual_seed(seed)
        self.y = torch.randint(0, 4, (n,), generator=g)
        self.x = torch.randn(n, 40, generator=g)
        at = torch.randint(0, 30, (n,), generator=g)
        for i in range(n):
            self.x[i, at[i]:at[i] + 10] += motif[self.y[i]]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def build():
    return nn.Sequential(nn.Unflatten(1, (1, 40)), nn.Conv1d(1, 32, 10), nn.ReLU(), nn.AdaptiveMaxPool1d(1),
                         nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def spread(model):
    """Largest distance of any weight from the mean over processes."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    mean = flat.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    gap = (flat - mean).abs().max()
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return gap.item()


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    s = torch.zeros(2)
    for x, y in loader:
        s += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(s)
    net.train()
    return (s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--warmup", type=int, default=20)
    ap.add_argument("--period", type=int, default=6)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)

    subgroup, _ = dist.new_subgroups(group_size=1)
    model = DDP(build())
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=args.warmup,
                              post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    opt = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4),
        averager=averagers.PeriodicModelAverager(period=args.period, warmup_steps=args.warmup))

    train, test = Sequences(2048, 1), Sequences(300, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, batch_size=50, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        tot = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            tot += torch.tensor([loss.item(), 1.0])
        gap = spread(model.module)
        averagers.utils.average_parameters(iter(list(model.module.parameters())), dist.group.WORLD)
        dist.all_reduce(tot)
        acc = evaluate(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch} loss {tot[0] / tot[1]:.4f} acc {acc:.4f} spread before averaging {gap:.2e}", flush=True)
            torch.save({"model": model.module.state_dict(), "optim": opt.state_dict(), "epoch": epoch}, "local_sgd.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
