"""Knowledge distillation: a wide network is trained first, a narrow one then imitates it."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5))


def samples(n, seed):
    proto = torch.randn(5, 10, generator=torch.Generator().manual_seed(400))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    return TensorDataset(proto[y] + 0.9 * torch.randn(n, 10, generator=g), y)


def soft_loss(student, teacher, t=2.0):
    return F.kl_div(F.log_softmax(student / t, 1), F.softmax(teacher / t, 1), reduction="batchmean") * t * t


def run_epochs(model, loss_of, epochs, lr):
    data = samples(320, 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = loss_of(model(x), x, y)
            opt.zero_grad()
            loss.backward()
            opt.step()


@torch.no_grad()
def accuracy(net):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = samples(200, 2).tensors
    x, y = x[rank::world], y[rank::world]
    counts = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def get_teacher(path, width):
    teacher = mlp(width)
    state = torch.load(path, map_location="cpu")
    teacher.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})
    return teacher.eval().requires_grad_(False)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--teacher", default="teacher.pt")
    ap.add_argument("--alpha", type=float, default=0.8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    torch.manual_seed(1)
    wide = DDP(mlp(96))
    run_epochs(wide, lambda out, x, y: F.cross_entropy(out, y), epochs=3, lr=3e-3)
    acc = accuracy(wide.module)
    if rank == 0:
        print(f"teacher after training: accuracy {acc:.3f}", flush=True)
        torch.save(wide.state_dict(), args.teacher)
    dist.barrier()

    torch.manual_seed(2)
    teacher = get_teacher(args.teacher, 96)
    narrow = DDP(mlp(16))

    def distill(out, x, y):
        return args.alpha * soft_loss(out, teacher(x)) + (1 - args.alpha) * F.cross_entropy(out, y)

    run_epochs(narrow, distill, epochs=8, lr=5e-3)
    acc = accuracy(narrow.module)
    if rank == 0:
        print(f"student: accuracy {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
