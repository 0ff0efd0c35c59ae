"""Freeze the encoder half-way; the flag for it is set when the model is wrapped."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(9, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU())
        self.gate = nn.Linear(9, 30)
        self.head = nn.Linear(30, 3)

    def forward(self, x, use_gate=True):
        h = self.encoder(x)
        if use_gate:
            h = h * torch.sigmoid(self.gate(x))
        return self.head(h)


class Freezer:
    def __init__(self, net, at):
        self.net, self.at, self.done = net, at, False

    def __call__(self, step):
        if step == self.at and not self.done:
            self.done = True
            for p in self.net.encoder.parameters():
                p.requires_grad_(False)
                p.grad = None
            return True
        return False


def batches(seed, n=32):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(n, 9, generator=g)
        yield x, x.view(n, 3, 3).sum(2).argmax(1)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    freezer = Freezer(net, at=30)
    right = torch.zeros(1)
    for step, (x, y) in zip(range(60), batches(rank)):
        if freezer(step) and rank == 0:
            print("encoder frozen at step", step)
        out = model(x, use_gate=step % 5 != 0)
        loss = nn.functional.cross_entropy(out, y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        right += (out.argmax(1) == y).float().mean()
        if step % 20 == 19:
            dist.all_reduce(right)
            if rank == 0:
                print(f"step {step + 1}: accuracy {right.item() / 20 / dist.get_world_size():.3f}")
            right.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
