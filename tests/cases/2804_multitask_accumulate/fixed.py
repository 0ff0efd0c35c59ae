import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MultiTask(Dataset):
    """Regression, classification and ranking on the same inputs."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        w = torch.Generator().manual_seed(99)
        self.x = torch.randn(n, 24, generator=g)
        proj = torch.randn(24, 6, generator=w)
        h = torch.tanh(self.x @ proj / 4)
        self.y_reg = h[:, :2].sum(1) + 0.05 * torch.randn(n, generator=g)
        self.y_cls = h[:, :4].argmax(1)
        self.y_rank = h[:, 5]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y_reg[i], self.y_cls[i], self.y_rank[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.reg = nn.Linear(64, 1)
        self.cls = nn.Linear(64, 4)
        self.rank = nn.Linear(64, 1)
        self.log_vars = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        h = self.trunk(x)
        return self.reg(h).squeeze(1), self.cls(h), self.rank(h).squeeze(1)


def task_losses(out, y_reg, y_cls, y_rank):
    reg, cls, score = out
    sign = torch.sign(y_rank.unsqueeze(1) - y_rank.unsqueeze(0))
    margin = score.unsqueeze(1) - score.unsqueeze(0)
    return torch.stack([F.mse_loss(reg, y_reg), F.cross_entropy(cls, y_cls), F.relu(0.2 - sign * margin)[sign != 0].mean()])


def combine(losses, log_vars):
    return (losses * torch.exp(-log_vars) + log_vars).sum()


def average_gradients(model):
    world = dist.get_world_size()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= world


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    acc = torch.zeros(3)
    for x, yr, yc, _ in loader:
        reg, cls, _ = model(x)
        acc += torch.tensor([(reg - yr).pow(2).sum(), (cls.argmax(1) == yc).sum(), len(x)])
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[2]).item(), (acc[1] / acc[2]).item()


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.02)
    return ap.parse_args()


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = Net()
    for p in model.parameters():
        dist.broadcast(p.detach(), src=0)

    train, valid = MultiTask(6144, 1), MultiTask(1024, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=21, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler, drop_last=True)
    vloader = DataLoader(valid, batch_size=128, sampler=DistributedSampler(valid, world, rank, shuffle=False))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        opt.zero_grad()
        for i, (x, yr, yc, yk) in enumerate(loader):
            boundary = (i + 1) % args.accum == 0
            loss = combine(task_losses(model(x), yr, yc, yk), model.log_vars) / args.accum
            loss.backward()
            if boundary:
                average_gradients(model)
                nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                opt.step()
                opt.zero_grad()
        mse, acc = evaluate(model, vloader)
        if rank == 0:
            print(f"epoch {epoch}: mse {mse:.4f} acc {acc:.4f} weights {torch.exp(-model.log_vars).tolist()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
