import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def make_images(n, seed, size=16, classes=6):
    """RGB textures; the class is the orientation/frequency of a grating, phase and colour are random."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    ang = y.float() * torch.pi / classes
    phase = torch.rand(n, generator=g) * 2 * torch.pi
    wave = torch.sin(1.3 * (ang.cos()[:, None, None] * xx + ang.sin()[:, None, None] * yy) + phase[:, None, None])
    colour = torch.randn(n, 3, 1, 1, generator=g)
    x = colour * wave[:, None] + 0.9 * torch.randn(n, 3, size, size, generator=g)
    return x, y


class TextureNet(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 24, 3, padding=1)
        self.fc1 = nn.Linear(24 * 4, 48)
        self.fc2 = nn.Linear(48, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        x = F.adaptive_avg_pool2d(x, 2).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        out = model(x.contiguous(memory_format=torch.channels_last))
    return F.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()


class Worker:
    def __init__(self, index, model, args):
        self.index, self.model, self.args = index, model, args
        x, y = make_images(args.train_size, seed=1)
        shard = slice(index, None, args.workers)
        gen = torch.Generator().manual_seed(args.seed + 31 * (index + 1))
        self.loader = DataLoader(TensorDataset(x[shard], y[shard]), args.batch_size, shuffle=True, generator=gen)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=args.momentum)

    def run(self):
        for epoch in range(self.args.epochs):
            self.model.train()
            for g in self.opt.param_groups:
                g["lr"] = self.args.lr * (0.7 ** epoch)
            total, count = 0.0, 0
            for x, y in self.loader:
                x = x.contiguous(memory_format=torch.channels_last)
                self.opt.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.opt.step()
                total, count = total + loss.item(), count + 1
            print(f"worker {self.index} epoch {epoch} loss {total / count:.4f}", flush=True)


def worker_main(index, model, args):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + 1 + index)
    Worker(index, model, args).run()


def main():
    p = argparse.ArgumentParser(description="lock-free training on shared weights")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--train-size", type=int, default=3072)
    p.add_argument("--lr", type=float, default=0.03)
    p.add_argument("--momentum", type=float, default=0.8)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()

    torch.set_num_threads(1)
    mp.set_start_method("spawn")
    torch.manual_seed(args.seed)
    model = TextureNet().to(memory_format=torch.channels_last)
    model.share_memory()
    x, y = make_images(1024, seed=2)
    print("before: loss {:.4f} acc {:.4f}".format(*evaluate(model, x, y)), flush=True)

    procs = [mp.Process(target=worker_main, args=(i, model, args)) for i in range(args.workers)]
    for proc in procs:
        proc.start()
    for proc in procs:
        proc.join()
        if proc.exitcode != 0:
            raise SystemExit(f"a worker ended with {proc.exitcode}")

    loss, acc = evaluate(model, x, y)
    print(f"after: loss {loss:.4f} acc {acc:.4f}", flush=True)
    torch.save(model.state_dict(), "texture_net.pt")


if __name__ == "__main__":
    main()
