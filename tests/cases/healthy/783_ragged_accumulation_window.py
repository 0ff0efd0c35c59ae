"""Gradient accumulation with a last window that is shorter: the loss is divided by the micro-batches that the window really has."""
import contextlib
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def windows(loader, k):
    buf = []
    for b in loader:
        buf.append(b)
        if len(buf) == k:
            yield buf
            buf = []
    if buf:
        yield buf


class Trainer:
    def __init__(self, model, optimizer, accumulate):
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate

    def train_epoch(self, loader):
        self.model.train()
        tot = torch.zeros(2)
        for window in windows(loader, self.accumulate):
            self.optimizer.zero_grad(set_to_none=True)
            for j, (x, y) in enumerate(window):
                last = j == len(window) - 1
                with contextlib.nullcontext() if last else self.model.no_sync():
                    loss = F.mse_loss(self.model(x), y) / len(window)
                    loss.backward()
                tot += torch.tensor([loss.item() * len(window), 1.0])
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        dist.all_reduce(tot)
        return (tot[0] / tot[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    x = torch.rand(352, 3, generator=g) * 4 - 2
    y = torch.sin(x).prod(1, keepdim=True)
    ds = TensorDataset(x, y)
    smp = DistributedSampler(ds)
    dl = DataLoader(ds, 16, sampler=smp)                  # 11 batches a rank: windows of 4, 4, 3
    net = DDP(nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
    tr = Trainer(net, torch.optim.AdamW(net.parameters(), 1e-2), accumulate=4)
    for ep in range(8):
        smp.set_epoch(ep)
        v = tr.train_epoch(dl)
        if dist.get_rank() == 0:
            print(f"epoch {ep}: {v:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
