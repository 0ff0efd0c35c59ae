"""Sentence tagger with fixed word vectors and a recurrent encoder."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class BracketDepth(Dataset):
    """Tag every token with the nesting depth at its position."""

    def __init__(self, n=320, length=24, seed=4):
        g = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 6, (n, length), generator=g)
        step = (self.tokens == 0).long() - (self.tokens == 1).long()
        self.depth = step.cumsum(1).clamp(-2, 2) + 2

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], self.depth[i]


class Tagger(nn.Module):
    def __init__(self, vectors, width=40, tags=5):
        super().__init__()
        self.words = nn.Embedding.from_pretrained(vectors, freeze=True)
        self.encoder = nn.RNN(vectors.size(1), width, batch_first=True)
        self.tags = nn.Linear(width, tags)

    def forward(self, tokens):
        return self.tags(self.encoder(self.words(tokens))[0])


def fit(model, loader, sampler, epochs, lr, max_norm, rank):
    trainable = filter(lambda p: p.requires_grad, model.parameters())
    opt = torch.optim.SGD(trainable, lr=lr, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        right = torch.zeros(2)
        for tokens, depth in loader:
            out = model(tokens)
            loss = nn.functional.cross_entropy(out.flatten(0, 1), depth.flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trainable, max_norm)
            opt.step()
            right += torch.tensor([(out.argmax(-1) == depth).sum().item(), depth.numel()])
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: token accuracy {(right[0] / right[1]).item():.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--max-norm", type=float, default=0.25)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(6)
    vectors = 2 * torch.randn(6, 20)
    model = DDP(Tagger(vectors))
    data = BracketDepth()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    fit(model, loader, sampler, args.epochs, args.lr, args.max_norm, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
