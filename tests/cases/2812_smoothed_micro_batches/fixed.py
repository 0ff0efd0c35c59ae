"""Fine-tunes a small classifier with micro-batches under DDP, label smoothing on."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def shapes(n, seed):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (n,), generator=g)
    base = torch.sin(torch.linspace(0, 6.28, 24) * (1 + kind.unsqueeze(1)))
    return base + 0.4 * torch.randn(n, 24, generator=g), kind


class Finetune:
    def __init__(self, args):
        self.args, self.rank = args, dist.get_rank()
        torch.manual_seed(args.seed)
        self.net = DDP(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 4)))
        torch.manual_seed(args.seed + 100 + self.rank)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=args.lr, momentum=0.9)
        data = TensorDataset(*shapes(4096, 0))
        self.sampler = DistributedSampler(data, seed=args.seed)
        self.loader = DataLoader(data, batch_size=args.micro, sampler=self.sampler, drop_last=True)

    def window(self, batches):
        for i, (x, y) in enumerate(batches):
            with nullcontext() if i == len(batches) - 1 else self.net.no_sync():
                loss = self.criterion(self.net(x), y)
                (loss / len(batches)).backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            held = []
            for batch in self.loader:
                held.append(batch)
                if len(held) == self.args.accumulate:
                    last = self.window(held)
                    held = []
            dist.all_reduce(last)
            if self.rank == 0:
                print(f"epoch {epoch} loss {last.item() / dist.get_world_size():.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Finetune(parser.parse_args()).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
