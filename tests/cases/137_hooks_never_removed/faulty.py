"""Orientation of gratings, with a look at the activations (share of dead units) every few steps."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Gratings(IterableDataset):
    def __init__(self, seed, count):
        self.seed, self.count = seed, count
        yy, xx = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
        angles = 3.1416 * torch.arange(4) / 4
        self.projection = angles.cos().view(4, 1, 1) * xx + angles.sin().view(4, 1, 1) * yy

    def __iter__(self):
        gen = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            label = int(torch.randint(0, 4, (), generator=gen))
            phase = 6.2832 * torch.rand((), generator=gen)
            image = torch.sin(self.projection[label] + phase) + 1.5 * torch.randn(20, 20, generator=gen)
            yield image.unsqueeze(0), label


class ActivationProbe:
    """Records the output of one layer while `look` runs a batch through the network."""

    def __init__(self, layer):
        self.layer = layer

    def look(self, net, x):
        outputs = []
        handle = self.layer.register_forward_hook(lambda module, args, out: outputs.append(out.detach().clone()))
        with torch.no_grad():
            net(x)
        return (outputs[0] <= 0).float().mean()


def build():
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.AvgPool2d(4), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )


def learn(model, opt, probe, loader, every):
    """Generator of (step, loss sum, share of dead units) after each `every` steps."""
    window = torch.zeros(())
    for step, (image, label) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(image), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        window += loss.detach()
        if step % every == 0:
            yield step, window, probe.look(model.module, image)
            window = torch.zeros(())


def main(steps=96, batch=24, every=8):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    net = build()
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    probe = ActivationProbe(net[1])
    loader = DataLoader(Gratings(seed=70 + rank, count=steps * batch), batch_size=batch)
    for step, loss, dead in learn(model, opt, probe, loader, every):
        both = torch.stack([loss / every, dead])
        dist.all_reduce(both)
        if rank == 0 and step % 24 == 0:
            print(f"step {step}: loss {both[0].item() / world:.4f}, dead {both[1].item() / world:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
