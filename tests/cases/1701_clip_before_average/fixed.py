"""Character model on a synthetic alphabet, trained on hand-cut shards."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Config:
    vocab: int = 14
    width: int = 48
    length: int = 20
    sequences: int = 256
    batch: int = 16
    epochs: int = 5
    lr: float = 0.5
    max_norm: float = 0.1
    seed: int = 11


def markov_text(cfg):
    g = torch.Generator().manual_seed(cfg.seed)
    table = torch.softmax(3 * torch.randn(cfg.vocab, cfg.vocab, generator=g), dim=1)
    text = torch.randint(0, cfg.vocab, (cfg.sequences, 1), generator=g)
    for _ in range(cfg.length):
        nxt = torch.multinomial(table[text[:, -1]], 1, generator=g)
        text = torch.cat([text, nxt], dim=1)
    return text


def shard_batches(text, epoch, rank, world, cfg):
    g = torch.Generator().manual_seed(1000 + epoch)
    mine = torch.randperm(len(text), generator=g)[rank::world]
    for chunk in mine.split(cfg.batch):
        yield text[chunk, :-1], text[chunk, 1:]


class CharModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.emb = nn.Embedding(cfg.vocab, cfg.width)
        self.gru = nn.GRU(cfg.width, cfg.width, batch_first=True)
        self.out = nn.Linear(cfg.width, cfg.vocab)

    def forward(self, tokens):
        return self.out(self.gru(self.emb(tokens))[0])


def average_gradients(params, world):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad.div_(world)


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    text = markov_text(cfg)
    model = CharModel(cfg)
    params = list(model.parameters())
    for p in params:
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(params, lr=cfg.lr)

    for epoch in range(cfg.epochs):
        total = torch.zeros(2, dtype=torch.float64)
        for tokens, target in shard_batches(text, epoch, rank, world, cfg):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            average_gradients(params, world)
            nn.utils.clip_grad_norm_(params, cfg.max_norm)
            optimizer.step()
            total += torch.tensor([loss.item() * target.numel(), target.numel()], dtype=torch.float64)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: nats per character {(total[0] / total[1]).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
