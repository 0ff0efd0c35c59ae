"""Masked-token pre-training with ZeRO-1 and checkpoints."""
import argparse
import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

MASK = 0


class Encoder(nn.Module):
    def __init__(self, vocab=30, d=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(12, d)
        self.layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        return self.out(self.layer(self.tok(x) + self.pos.weight))


def sentences(n=256):
    g = torch.Generator().manual_seed(15)
    start, stride = torch.randint(1, 29, (n, 1), generator=g), torch.randint(1, 4, (n, 1), generator=g)
    return TensorDataset((start + stride * torch.arange(12)) % 29 + 1)


def mask_tokens(x, rng):
    hide = torch.rand(x.shape, generator=rng) < 0.25
    hide[:, 0] = True
    return x.masked_fill(hide, MASK), x.masked_fill(~hide, -100)


def save(path, model, optimizer, epoch):
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--out", default="mlm.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    torch.manual_seed(0)
    model = DDP(Encoder())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
    data = sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    rng = torch.Generator().manual_seed(50 + dist.get_rank())
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for (x,) in loader:
            inp, target = mask_tokens(x, rng)
            loss = nn.functional.cross_entropy(model(inp).flatten(0, 1), target.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mlm loss {total[0] / total[1]:.4f}")
        save(args.out, model, optimizer, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
