"""Student network learns from a fixed teacher, with a configurable output layer."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Inputs(Dataset):
    def __init__(self, n=320):
        self.x = torch.randn(n, 18, generator=torch.Generator().manual_seed(52))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def mlp(widths):
    layers = []
    for a, b in zip(widths[:-1], widths[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def teacher(classes):
    torch.manual_seed(123)
    net = mlp([18, 64, 64, classes])
    for p in net.parameters():
        p.requires_grad_(False)
        p.mul_(2.0)
    return net.eval()


def distill(student_logits, teacher_logits, temperature=2.0):
    target = F.softmax(teacher_logits / temperature, dim=1)
    return F.kl_div(F.log_softmax(student_logits / temperature, dim=1), target, reduction="batchmean") * temperature**2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--classes", type=int, default=7)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.02)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    guide = teacher(args.classes)
    torch.manual_seed(0)
    student = mlp([18, 32, 10])
    optimizer = torch.optim.SGD(student.parameters(), lr=args.lr, momentum=0.9)
    student[-1] = nn.Linear(32, args.classes)
    model = DDP(student)
    data = Inputs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        agree = torch.zeros(2)
        for x in loader:
            with torch.no_grad():
                wanted = guide(x)
            got = model(x)
            loss = distill(got, wanted)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            agree += torch.tensor([(got.argmax(1) == wanted.argmax(1)).sum().item(), len(x)])
        dist.all_reduce(agree)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, agreement {(agree[0] / agree[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
