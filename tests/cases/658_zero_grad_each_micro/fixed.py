"""Gradient accumulation with no_sync on a caption-like decoder (LSTM)."""
import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Captioner(nn.Module):
    def __init__(self, feat=12, vocab=15, d=32):
        super().__init__()
        self.init = nn.Linear(feat, d)
        self.embed = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, feat, words):
        h = torch.tanh(self.init(feat))[None]
        return self.out(self.rnn(self.embed(words), h)[0])


def captions(n=320):
    g = torch.Generator().manual_seed(47)
    feat = torch.randn(n, 12, generator=g)
    first = feat[:, :5].argmax(1)
    words = (first[:, None] + torch.arange(7) * (1 + (feat[:, 5:6] > 0).long())) % 15
    return TensorDataset(feat, words)


class Accumulator:
    """Step every `every` micro-batches; all but the last one run without sync."""

    def __init__(self, model, opt, every):
        self.model, self.opt, self.every, self.count = model, opt, every, 0

    def backward(self, closure):
        self.count += 1
        last = self.count % self.every == 0
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss = closure()
            (loss / self.every).backward()
        if last:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad(set_to_none=True)
        return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--every", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Captioner())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = captions()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.micro_batch, sampler=sampler, drop_last=True)
    acc = Accumulator(model, opt, args.every)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for feat, words in loader:
            def closure():
                logits = model(feat, words[:, :-1])
                return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

            losses.append(acc.backward(closure))
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
