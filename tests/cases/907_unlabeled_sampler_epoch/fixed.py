"""FixMatch on 2-d points: a few labelled ones, many without label, weak and strong jitter."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def spiral(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 4 * r + 2.0944 * y + 0.2 * torch.randn(n, generator=g)
    return torch.stack([r * a.cos(), r * a.sin()], 1), y


class Labeled(Dataset):
    def __init__(self, n=64):
        self.x, self.y = spiral(n, 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.02 * torch.randn(2), self.y[i]


class Unlabeled(Dataset):
    def __init__(self, n=480):
        self.x, _ = spiral(n, 2)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.02 * torch.randn(2), self.x[i] + 0.12 * torch.randn(2)


def make_loader(dataset, batch_size):
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True), sampler


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--total-steps", type=int, default=60)
    ap.add_argument("--eval-step", type=int, default=20)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--mu", type=int, default=4)
    ap.add_argument("--threshold", type=float, default=0.8)
    ap.add_argument("--lambda-u", type=float, default=1.0)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)))
    torch.manual_seed(3 + rank)  # jitter
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    labeled_loader, labeled_sampler = make_loader(Labeled(), args.batch_size)
    unlabeled_loader, unlabeled_sampler = make_loader(Unlabeled(), args.batch_size * args.mu)
    labeled_epoch = unlabeled_epoch = 0
    labeled_sampler.set_epoch(labeled_epoch)
    unlabeled_sampler.set_epoch(unlabeled_epoch)
    labeled_iter, unlabeled_iter = iter(labeled_loader), iter(unlabeled_loader)

    model.train()
    meters = torch.zeros(3)
    for step in range(1, args.total_steps + 1):
        try:
            x, y = next(labeled_iter)
        except StopIteration:
            labeled_epoch += 1
            labeled_sampler.set_epoch(labeled_epoch)
            labeled_iter = iter(labeled_loader)
            x, y = next(labeled_iter)
        try:
            u_w, u_s = next(unlabeled_iter)
        except StopIteration:
            unlabeled_epoch += 1
            unlabeled_sampler.set_epoch(unlabeled_epoch)
            unlabeled_iter = iter(unlabeled_loader)
            u_w, u_s = next(unlabeled_iter)

        logits = model(torch.cat([x, u_w, u_s]))
        logits_x, logits_w, logits_s = logits.split([len(x), len(u_w), len(u_s)])
        loss_x = F.cross_entropy(logits_x, y)
        prob, target = logits_w.detach().softmax(1).max(1)
        mask = (prob >= args.threshold).float()
        loss_u = (F.cross_entropy(logits_s, target, reduction="none") * mask).mean()
        optimizer.zero_grad()
        (loss_x + args.lambda_u * loss_u).backward()
        optimizer.step()

        meters += torch.tensor([loss_x.item(), loss_u.item(), mask.mean().item()])
        if step % args.eval_step == 0:
            dist.all_reduce(meters)
            if rank == 0:
                lx, lu, m = (meters / args.eval_step / dist.get_world_size()).tolist()
                print(f"step {step}: loss_x {lx:.3f} loss_u {lu:.3f} mask {m:.2f}", flush=True)
            meters.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
