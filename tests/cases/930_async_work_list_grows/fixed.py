"""DDP training with a monitor of the gradient's noise scale (communication hidden behind the next step)."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class NoiseMonitor:
    """Compares the norm of a fixed probe batch's local gradient with that of its mean over the ranks."""

    def __init__(self, net, batch):
        self.net, self.batch = net, batch
        self.params = list(net.parameters())
        self.pending = []
        self.small = self.big = 0.0
        self.count = 0

    def launch(self):
        x, y = self.batch()
        loss = F.cross_entropy(self.net(x), y)
        grads = torch.autograd.grad(loss, self.params)
        flat = torch.cat([g.flatten() for g in grads])
        self.small += flat.square().sum().item()
        self.pending.append((dist.all_reduce(flat, async_op=True), flat))

    def collect(self):
        if not self.pending:
            return
        work, flat = self.pending.pop()
        work.wait()
        self.big += (flat / dist.get_world_size()).square().sum().item()
        self.count += 1

    def report(self):
        b = max(self.count, 1)
        return (self.small - self.big) / b / max(self.big / b, 1e-12)


def task(n, gen):
    x = torch.randn(n, 64, generator=gen)
    return x, (x[:, :32].sum(1) * x[:, 32:].sum(1) > 0).long() + 2 * (x[:, 0] > 0).long()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.03)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    gen = torch.Generator().manual_seed(500 + rank)
    probe_gen = torch.Generator().manual_seed(900 + rank)
    monitor = NoiseMonitor(net, lambda: task(16, probe_gen))

    running = torch.zeros(1)
    for step in range(1, args.steps + 1):
        x, y = task(args.batch, gen)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        monitor.collect()
        optimizer.step()
        monitor.launch()
        running += loss.detach()
        if step % 50 == 0:
            dist.all_reduce(running)
            if rank == 0:
                print(f"step {step}: loss {running.item() / 50 / dist.get_world_size():.4f} "
                      f"noise {monitor.report():.3f}", flush=True)
            running.zero_()
    monitor.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
