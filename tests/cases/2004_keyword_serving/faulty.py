"""Keyword spotting on synthetic tones. After each epoch the score is also taken in bfloat16, as the serving host computes it."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS = ("up", "down", "left", "right", "stop")


class Tones(Dataset):
    """A keyword is a pair of tones, one after the other, under noise."""

    def __init__(self, n, seed, length=320):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, len(WORDS), (n,), generator=g)
        time = torch.arange(length) / length
        first = 8.0 + 7 * self.label.unsqueeze(1)
        second = 40.0 - 6 * self.label.unsqueeze(1)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        half = (time > 0.5).float()
        wave = torch.sin(6.28 * first * time + phase) * (1 - half) + torch.sin(6.28 * second * time + phase) * half
        self.wave = wave + 1.2 * torch.randn(n, length, generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.wave[i].unsqueeze(0), self.label[i]


class Spotter(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, c, 16, stride=4), nn.GELU(), nn.Conv1d(c, 2 * c, 8, stride=2), nn.GELU(), nn.AdaptiveAvgPool1d(8), nn.Flatten()
        )
        self.classify = nn.Sequential(nn.LayerNorm(16 * c), nn.Linear(16 * c, 64), nn.GELU(), nn.Linear(64, len(WORDS)))

    def forward(self, wave):
        return self.classify(self.features(wave))


def hits(net, loader, dtype):
    count = torch.zeros(2)
    for wave, label in loader:
        found = net(wave.to(dtype)).argmax(1)
        count += torch.tensor([(found == label).sum().item(), len(label)])
    dist.all_reduce(count)
    return (count[0] / count[1]).item()


@torch.no_grad()
def score(net, loader):
    net.eval()
    result = hits(net, loader, torch.float32)
    net.train()
    return result


@torch.no_grad()
def serving_score(net, loader):
    net.eval()
    masters = [p.data for p in net.parameters()]
    for p in net.parameters():
        p.data = p.data.to(torch.bfloat16)
    result = hits(net, loader, torch.bfloat16)
    for p, master in zip(net.parameters(), masters):
        p.data = master
    net.train()
    return result


def train_epoch(model, loader, opt):
    total = torch.zeros(1)
    for wave, label in loader:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(wave), label)
        loss.backward()
        opt.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=20)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(21)
    train, test = Tones(400, seed=1), Tones(120, seed=2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch, sampler=sampler)
    test_loader = DataLoader(test, args.batch, sampler=DistributedSampler(test, shuffle=False))
    net = Spotter()
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, opt)
        exact, served = score(net, test_loader), serving_score(net, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  loss {loss:.4f}  accuracy {exact:.3f}  in bfloat16 {served:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
