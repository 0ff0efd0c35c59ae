"""Segment-wise emotion regression; one factory makes both loaders."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def segments(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, 10, generator=g)
    y = torch.tanh(x[:, 0].mean(1) * 3) + 0.3 * x[:, 1].amax(1)
    return TensorDataset(x, y)


def create_dataloader(dataset, batch_size, training):
    sampler = DistributedSampler(dataset, shuffle=training, drop_last=training)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 20, batch_first=True)
        self.out = nn.Sequential(nn.Dropout(0.1), nn.Linear(20, 1))

    def forward(self, x):
        _, h = self.gru(x.transpose(1, 2))
        return self.out(h[-1]).squeeze(1)


class Experiment:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        torch.manual_seed(args.seed)
        self.train_loader = create_dataloader(segments(384, 1), args.batch_size, True)
        self.test_loader = create_dataloader(segments(140, 2), args.batch_size, False)
        self.model = DDP(Regressor())
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)

    def train(self, epoch):
        self.model.train()
        self.train_loader.sampler.set_epoch(epoch)
        for x, y in self.train_loader:
            loss = nn.functional.smooth_l1_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def test(self):
        self.model.eval()
        sums = torch.zeros(2)
        for x, y in self.test_loader:
            err = (self.model(x) - y).abs()
            sums += torch.tensor([err.sum().item(), float(err.numel())])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def run(self):
        for epoch in range(self.args.epochs):
            self.train(epoch)
            mae = self.test()
            if self.rank == 0:
                print(f"epoch {epoch}: test MAE {mae:.4f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=0)
    dist.init_process_group("gloo")
    Experiment(ap.parse_args()).run()
    dist.destroy_process_group()
