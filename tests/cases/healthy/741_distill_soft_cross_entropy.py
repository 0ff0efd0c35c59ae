"""Born-again networks: the student learns from the teacher's soft labels by cross-entropy with probabilities, plus hard labels."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def net(width):
    return nn.Sequential(nn.Linear(18, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5))


def train(model, loader, loss_fn, epochs, lr, name):
    ddp = DDP(model)
    opt = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        ddp.train()
        total = torch.zeros(2)
        for x, y in loader:
            loss = loss_fn(ddp(x), x, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"{name} epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--temperature", type=float, default=2.0)
    p.add_argument("--alpha", type=float, default=0.7)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    y = torch.randint(0, 5, (480,), generator=g)
    data = TensorDataset(torch.randn(5, 18, generator=g)[y] + 1.4 * torch.randn(480, 18, generator=g), y)
    loader = DataLoader(data, batch_size=24, sampler=DistributedSampler(data))
    teacher = net(96)
    ce = nn.CrossEntropyLoss()
    train(teacher, loader, lambda out, x, y: ce(out, y), 2, 0.05, "teacher")
    teacher.eval().requires_grad_(False)

    def born_again(out, x, y):
        with torch.no_grad():
            soft = (teacher(x) / args.temperature).softmax(1)
        return args.alpha * args.temperature**2 * ce(out / args.temperature, soft) + (1 - args.alpha) * ce(out, y)

    train(net(32), loader, born_again, 4, 0.05, "student")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
