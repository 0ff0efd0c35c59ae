"""Disruption forecasting toy: temporal convolution, LR on plateau of the validation loss."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def shots(n=300):
    g = torch.Generator().manual_seed(37)
    y = (torch.rand(n, generator=g) < 0.4).float()
    x = torch.randn(n, 3, 40, generator=g)
    x[:, 0, 25:] += 0.6 * y[:, None]
    x[:, 1, 30:] *= 1 + y[:, None]
    return TensorDataset(x, y)


class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv1d(3, 12, 5, padding=4)
        self.c2 = nn.Conv1d(12, 12, 5, padding=8, dilation=2)
        self.fc = nn.Linear(12, 1)

    def forward(self, x):
        h = torch.relu(self.c1(x)[..., : x.size(-1)])
        h = torch.relu(self.c2(h)[..., : x.size(-1)])
        return self.fc(h.amax(-1)).squeeze(1)


@torch.no_grad()
def validation_loss(model, loader):
    model.eval()
    total = torch.zeros(2)
    for x, y in loader:
        total[0] += nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
        total[1] += len(y)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=9)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--batch-size", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, val = random_split(shots(), [220, 80], generator=torch.Generator().manual_seed(1))
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, args.batch_size, sampler=sampler)
    val_loader = DataLoader(val, 40, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(TCN())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=0, threshold=1e-3)
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            opt.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
            opt.step()
        loss = validation_loss(model, val_loader)
        plateau.step(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: val {loss:.4f} lr {opt.param_groups[0]['lr']:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
