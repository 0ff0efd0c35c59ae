"""Student and teacher: distillation, then an exact test score from gathered predictions."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def mlp(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5))


def inputs(n, seed):
    return torch.randn(n, 10, generator=torch.Generator().manual_seed(seed))


def distil_loss(student, teacher, t):
    return F.kl_div((student / t).log_softmax(1), (teacher / t).softmax(1), reduction="batchmean") * t * t


@torch.no_grad()
def predict_all(net, data, batch_size):
    """Predictions for the whole set, on every process."""
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    mine = torch.cat([net(x).argmax(1) for x, _ in loader])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--temperature", type=float, default=2.0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    torch.manual_seed(30)
    teacher = mlp(64).requires_grad_(False)
    for p in teacher.parameters():
        p.mul_(2.5)
    student = DistributedDataParallel(mlp(24))
    opt = torch.optim.Adam(student.parameters(), lr=8e-3)

    x = inputs(400, 1)
    train = TensorDataset(x, teacher(x))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            loss = distil_loss(student(batch), target, args.temperature)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: distillation loss {loss.item():.4f}")

    x = inputs(160, 2)
    test = TensorDataset(x, teacher(x).argmax(1))
    guess = predict_all(student.module.eval(), test, args.batch_size)
    if rank == 0:
        print(f"agreement with the teacher: {(guess == test.tensors[1]).float().mean().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
