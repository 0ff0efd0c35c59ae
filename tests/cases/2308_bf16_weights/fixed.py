"""Fine-tune a small text classifier from 'pretrained' weights under bf16 autocast."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class ModelArgs:
    vocab: int = 60
    length: int = 20
    dim: int = 64
    heads: int = 4
    depth: int = 2
    classes: int = 4


@dataclass
class TrainArgs:
    epochs: int = 5
    batch: int = 20
    lr: float = 2e-4
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    model: ModelArgs = field(default_factory=ModelArgs)


def reviews(n: int, m: ModelArgs, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(m.classes * 5, m.vocab, (n, m.length), generator=g)
    y = torch.randint(0, m.classes, (n,), generator=g)
    for _ in range(4):
        where = torch.randint(0, m.length, (n, 1), generator=g)
        word = (y * 5 + torch.randint(0, 5, (n,), generator=g)).unsqueeze(1)
        noise = torch.randint(0, m.classes * 5, (n, 1), generator=g)
        word = torch.where(torch.rand(n, 1, generator=g) < 0.25, noise, word)
        x.scatter_(1, where, word)
    return TensorDataset(x, y)


class Classifier(nn.Module):
    def __init__(self, m: ModelArgs) -> None:
        super().__init__()
        self.tok = nn.Embedding(m.vocab, m.dim)
        self.pos = nn.Parameter(0.02 * torch.randn(m.length, m.dim))
        layer = nn.TransformerEncoderLayer(m.dim, m.heads, 2 * m.dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, m.depth, enable_nested_tensor=False)
        self.head = nn.Linear(m.dim, m.classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(self.tok(x) + self.pos)
        return self.head(h.mean(1))


def pretrained(m: ModelArgs) -> Classifier:
    torch.manual_seed(100)
    net = Classifier(m)
    with torch.no_grad():
        net.tok.weight.mul_(0.7)
        net.head.weight.mul_(0.5)
    return net


def param_groups(model: nn.Module, wd: float) -> list[dict]:
    matrices, rest = [], []
    for p in model.parameters():
        (matrices if p.ndim > 1 else rest).append(p)
    return [{"params": matrices, "weight_decay": wd}, {"params": rest, "weight_decay": 0.0}]


@torch.inference_mode()
def accuracy(model: DistributedDataParallel, data: TensorDataset, rank: int, world: int) -> float:
    model.eval()
    x, y = data.tensors
    x, y = x[rank::world], y[rank::world]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model.module(x).argmax(-1)
    count = torch.tensor([(pred == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(count)
    model.train()
    return (count[0] / count[1]).item()


def train(args: TrainArgs) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set, test_set = reviews(2400, args.model, 1), reviews(600, args.model, 2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=5)
    loader = DataLoader(train_set, args.batch, sampler=sampler)

    net = pretrained(args.model).float()
    model = DistributedDataParallel(net)
    opt = torch.optim.AdamW(param_groups(model, args.weight_decay), lr=args.lr, betas=args.betas)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            loss = criterion(logits.float(), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        acc = accuracy(model, test_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: train loss {mean.item() / world:.4f}, test acc {acc:.4f}", flush=True)

    if rank == 0:
        torch.save(net.state_dict(), "classifier.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(TrainArgs())
    finally:
        dist.destroy_process_group()
