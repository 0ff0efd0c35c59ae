"""Pre-training on six kinds of signals, then fine-tuning with a new head on a coarser question and few labels."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())

    def forward(self, x):
        return self.layers(x)


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.encoder(x))


def signals(n, gen):
    kind = torch.randint(0, 6, (n,), generator=gen)
    t = torch.linspace(0, 1, 24)
    phase = 6.2832 * torch.rand(n, 1, generator=gen)
    return torch.sin(6.2832 * (kind.unsqueeze(1) + 1) * t + phase) + 0.3 * torch.randn(n, 24, generator=gen), kind


class Tally:
    """Loss and accuracy since the last line, over all ranks."""

    def __init__(self, title, every):
        self.title, self.every, self.stats = title, every, torch.zeros(3)

    def add(self, step, loss, out, target):
        self.stats += torch.tensor([loss.item() * len(out), (out.argmax(1) == target).sum().item(), len(out)])
        if step % self.every == 0:
            dist.all_reduce(self.stats)
            loss, acc = (self.stats[:2] / self.stats[2]).tolist()
            if dist.get_rank() == 0:
                print(f"{self.title} step {step}: loss {loss:.4f}, accuracy {acc:.3f}", flush=True)
            self.stats.zero_()


def optimise(model, opt, batches, tally):
    for step, (x, target) in enumerate(batches, start=1):
        out = model(x)
        loss = nn.functional.cross_entropy(out, target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        tally.add(step, loss, out, target)


def pretrain(gen, steps, path):
    model = DDP(Classifier(classes=6))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    optimise(model, opt, (signals(48, gen) for _ in range(steps)), Tally("pre-training", 50))
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()


def high_or_low(n, gen):
    x, kind = signals(n, gen)
    return x, kind // 3


def finetune(gen, steps, path):
    net = Classifier(classes=2)
    state = torch.load(path, map_location="cpu")
    net.load_state_dict(state, strict=False)  # the head is new
    model = DDP(net)
    opt = torch.optim.Adam([{"params": net.encoder.parameters(), "lr": 3e-4}, {"params": net.head.parameters()}], lr=1e-2)
    optimise(model, opt, (high_or_low(8, gen) for _ in range(steps)), Tally("fine-tuning", 15))


def main():
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(900 + dist.get_rank())
    pretrain(gen, steps=150, path="six_kinds.pt")
    finetune(gen, steps=60, path="six_kinds.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
