"""Intent classification, OneCycle learning rate."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Utterances(Dataset):
    def __init__(self, n=320, vocab=50, intents=5):
        g = torch.Generator().manual_seed(6)
        self.intent = torch.randint(0, intents, (n,), generator=g)
        self.words = torch.randint(intents, vocab, (n, 9), generator=g)
        at = torch.randint(0, 9, (n,), generator=g)
        self.words[torch.arange(n), at] = self.intent

    def __len__(self):
        return len(self.intent)

    def __getitem__(self, i):
        return self.words[i], self.intent[i]


class IntentNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.conv = nn.Conv1d(24, 32, 3, padding=1)
        self.out = nn.Linear(32, 5)

    def forward(self, words):
        h = torch.relu(self.conv(self.embed(words).transpose(1, 2)))
        return self.out(h.amax(-1))


def build_optimizer(model, dataset, loader, args):
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr / 10)
    steps_per_epoch = len(loader)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, epochs=args.epochs, steps_per_epoch=steps_per_epoch)
    return opt, sched


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.01)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Utterances()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    model = DDP(IntentNet())
    opt, sched = build_optimizer(model, data, loader, args)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        c = torch.zeros(3)
        for words, intent in loader:
            out = model(words)
            loss = nn.functional.cross_entropy(out, intent)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            c += torch.tensor([loss.item() * len(intent), (out.argmax(1) == intent).sum().item(), len(intent)])
        dist.all_reduce(c)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {c[0] / c[2]:.4f} acc {c[1] / c[2]:.3f} lr {sched.get_last_lr()[0]:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
