"""Training with a look at the share of silent units after every epoch."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Stream:
    """Endless generated batches; every process has its own part of the stream."""

    def __init__(self, size, seed):
        self.size, self.gen = size, torch.Generator().manual_seed(seed)

    def take(self, count):
        for _ in range(count):
            x = torch.randn(self.size, 32, generator=self.gen)
            yield x, x[:, :16].abs().sum(1, keepdim=True) - x[:, 16:].abs().sum(1, keepdim=True)


class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(32, width)
        self.act = nn.ReLU()
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.act(self.inp(x)))


@torch.no_grad()
def silent_share(net, batches):
    seen = []
    handle = net.act.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    for x, _ in batches:
        net(x)
    handle.remove()
    return (torch.cat(seen).amax(0) == 0).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch-size", type=int, default=256)
    ap.add_argument("--width", type=int, default=1024)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = Wide(args.width)
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    train = Stream(args.batch_size, seed=100 + rank)
    probe = Stream(args.batch_size, seed=7)

    for epoch in range(args.epochs):
        for x, y in train.take(args.steps):
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        share = silent_share(net, probe.take(4))
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, silent units {100 * share:.1f}%", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
