"""Character-level LSTM with clipping by the total gradient norm."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards quietly mix black jam in a zebra box. "


class Windows(Dataset):
    def __init__(self, repeats=12, length=24):
        self.chars = sorted(set(TEXT))
        index = {c: i for i, c in enumerate(self.chars)}
        self.ids = torch.tensor([index[c] for c in TEXT * repeats])
        self.length = length

    def __len__(self):
        return (len(self.ids) - 1) // 3 - self.length

    def __getitem__(self, i):
        chunk = self.ids[3 * i : 3 * i + self.length + 1]
        return chunk[:-1], chunk[1:]


class CharModel(nn.Module):
    def __init__(self, vocab, width=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.out(h)


class Trainer:
    def __init__(self, args):
        self.rank = dist.get_rank()
        self.args = args
        data = Windows()
        self.sampler = DistributedSampler(data, drop_last=True)
        self.loader = DataLoader(data, batch_size=16, sampler=self.sampler, drop_last=True)
        self.model = DDP(CharModel(len(data.chars)))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)

    def clip(self):
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        square = torch.stack([g.pow(2).sum() for g in grads]).sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        factor = (self.args.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for g in grads:
            g.mul_(factor)
        return norm.item()

    def step(self, ids, target):
        loss = nn.functional.cross_entropy(self.model(ids).flatten(0, 1), target.flatten())
        self.opt.zero_grad()
        loss.backward()
        norm = self.clip()
        self.opt.step()
        return loss.item(), norm

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            for ids, target in self.loader:
                loss, norm = self.step(ids, target)
            if self.rank == 0:
                print(f"epoch {epoch}: loss {loss:.3f} grad norm {norm:.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=0.5)
    ap.add_argument("--max-norm", type=float, default=0.25)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
