"""LoRA adaptation of a frozen encoder to a new labelling, with a merged-weights probe per epoch."""
import argparse
import contextlib
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / r
        self.a = nn.Parameter(torch.empty(r, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.merged = False

    @torch.no_grad()
    def merge(self):
        if not self.merged:
            self.base.weight += self.scale * (self.b @ self.a)

    @torch.no_grad()
    def unmerge(self):
        if self.merged:
            self.base.weight -= self.scale * (self.b @ self.a)
            self.merged = False

    def forward(self, x):
        y = self.base(x)
        return y if self.merged else y + self.scale * F.linear(F.linear(x, self.a), self.b)


class Encoder(nn.Module):
    def __init__(self, vocab, dim, classes):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.head = nn.Linear(dim, classes)

    def forward(self, ids):
        h = self.emb(ids).mean(1)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)


def inject(model, r):
    for p in model.parameters():
        p.requires_grad_(False)
    for i, layer in enumerate(model.layers):
        model.layers[i] = LoRALinear(layer, r)
    for p in model.head.parameters():
        p.requires_grad_(True)
    return model


@contextlib.contextmanager
def merged(model):
    adapters = [m for m in model.modules() if isinstance(m, LoRALinear)]
    for m in adapters:
        m.merge()
    try:
        yield model
    finally:
        for m in adapters:
            m.unmerge()


def documents(n, vocab, length, classes, seed, table_seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab, classes, generator=torch.Generator().manual_seed(table_seed))
    ids = torch.randint(vocab, (n, length), generator=g)
    return TensorDataset(ids, table[ids].mean(1).argmax(-1))


@torch.no_grad()
def probe(model, data):
    model.eval()
    hits = sum((model(ids).argmax(-1) == y).sum().item() for ids, y in DataLoader(data, batch_size=128))
    model.train()
    return hits / len(data)


def train(model, data, epochs, lr, batch, on_epoch, seed):
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        agg = torch.zeros(2)
        for ids, y in loader:
            loss = F.cross_entropy(model(ids), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            agg += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(agg)
        on_epoch(epoch, (agg[0] / agg[1]).item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--vocab", type=int, default=80)
    ap.add_argument("--dim", type=int, default=48)
    ap.add_argument("--rank", type=int, default=4)
    ap.add_argument("--classes", type=int, default=5)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main_rank = dist.get_rank() == 0
    torch.manual_seed(12)
    net = Encoder(args.vocab, args.dim, args.classes)
    source = documents(1024, args.vocab, 10, args.classes, 1, 100)
    target = documents(1536, args.vocab, 10, args.classes, 2, 200)
    held_out = documents(512, args.vocab, 10, args.classes, 3, 200)

    def pretrain_log(epoch, loss):
        if main_rank:
            print(f"pretrain {epoch} loss {loss:.4f}", flush=True)

    train(DDP(net), source, 4, 3e-3, 32, pretrain_log, 1)
    adapted = DDP(inject(net, args.rank))

    def adapt_log(epoch, loss):
        if main_rank:
            with merged(adapted.module) as m:
                print(f"adapt {epoch} loss {loss:.4f} held-out {probe(m, held_out):.3f}", flush=True)
        dist.barrier()

    train(adapted, target, 6, 4e-3, 32, adapt_log, 2)
    if main_rank:
        torch.save({k: v for k, v in net.state_dict().items() if k.endswith((".a", ".b")) or "head" in k}, "adapter.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
