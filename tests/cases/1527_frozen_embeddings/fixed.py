"""Transformer classifier on top of fixed word vectors."""
import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclasses.dataclass
class Config:
    vocab: int = 200
    width: int = 32
    heads: int = 4
    classes: int = 5
    length: int = 12
    epochs: int = 4
    batch: int = 16
    lr: float = 0.2
    max_norm: float = 0.3


class Sentences(Dataset):
    def __init__(self, cfg, n=512):
        g = torch.Generator().manual_seed(3)
        self.y = torch.randint(0, cfg.classes, (n,), generator=g)
        self.ids = torch.randint(0, cfg.vocab, (n, cfg.length), generator=g)
        own = self.y.unsqueeze(1) * (cfg.vocab // cfg.classes)
        self.ids[:, ::2] = own + torch.randint(0, cfg.vocab // cfg.classes, (n, cfg.length // 2), generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.ids[i], self.y[i]


class Reader(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        vectors = torch.randn(cfg.vocab, cfg.width, generator=torch.Generator().manual_seed(8))
        self.words = nn.Embedding.from_pretrained(vectors, freeze=True)
        self.mixer = nn.TransformerEncoderLayer(cfg.width, cfg.heads, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(cfg.width, cfg.classes)

    def forward(self, ids):
        return self.out(self.mixer(self.words(ids)).mean(1))


def build(cfg):
    torch.manual_seed(0)
    model = DDP(Reader(cfg))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=cfg.lr, momentum=0.9)
    return model, trainable, optimizer


def main(cfg=Config()):
    dist.init_process_group("gloo")
    model, trainable, optimizer = build(cfg)
    data = Sentences(cfg)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=cfg.batch, sampler=sampler)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        hits = seen = 0
        for ids, y in loader:
            logits = model(ids)
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, y).backward()
            nn.utils.clip_grad_norm_(trainable, cfg.max_norm)
            optimizer.step()
            hits += (logits.argmax(1) == y).sum().item()
            seen += len(y)
        both = torch.tensor([float(hits), float(seen)])
        dist.all_reduce(both)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: train accuracy {(both[0] / both[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
