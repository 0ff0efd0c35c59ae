import argparse
import contextlib
import json
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

V, L = 24, 16


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base, self.scaling, self.enabled = base, alpha / r, True
        for p in base.parameters():
            p.requires_grad = False
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        y = self.base(x)
        if self.enabled:
            y = y + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling
        return y


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, d // 4).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class TinyLM(nn.Module):
    def __init__(self, d=64, n=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, d), nn.Embedding(L, d)
        self.blocks = nn.ModuleList([Block(d) for _ in range(n)])
        self.head = nn.Linear(d, V)

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for b in self.blocks:
            h = b(h)
        return self.head(h)


def corpus(n, shift, seed):
    g = torch.Generator().manual_seed(seed)
    s = torch.zeros(n, L + 1, dtype=torch.long)
    s[:, 0] = torch.randint(0, V, (n,), generator=g)
    for t in range(L):
        noise = torch.rand(n, generator=g) < 0.1
        s[:, t + 1] = torch.where(noise, torch.randint(0, V, (n,), generator=g), (s[:, t] * 5 + shift) % V)
    return s


def inject(model):
    for b in model.blocks:
        for name in ("qkv", "proj", "up", "down"):
            setattr(b, name, LoRALinear(getattr(b, name)))
    for n, p in model.named_parameters():
        p.requires_grad = "lora_" in n


@contextlib.contextmanager
def adapters_off(model):
    mods = [m for m in model.modules() if isinstance(m, LoRALinear)]
    for m in mods:
        m.enabled = False
    try:
        yield
    finally:
        for m in mods:
            m.enabled = True


class EarlyStopping:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta, self.best, self.bad = patience, min_delta, float("inf"), 0

    def step(self, v):
        if v < self.best - self.min_delta:
            self.best, self.bad = v, 0
            return True, False
        self.bad += 1
        return False, self.bad >= self.patience


def pretrain(model, rank):
    """The 'hub' weights: the same seed and the same data give the same weights in every process."""
    data = corpus(512, 3, 1)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(8)
    for _ in range(60):
        b = data[torch.randint(0, len(data), (32,), generator=g)]
        loss = F.cross_entropy(model(b[:, :-1]).reshape(-1, V), b[:, 1:].reshape(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"base loss {loss.item():.3f}")


@torch.no_grad()
def val_loss(net, val):
    """Process 0 looks at the whole validation set, the others wait for its number."""
    net.eval()
    loss = F.cross_entropy(net(val[:, :-1]).reshape(-1, V), val[:, 1:].reshape(-1)).item()
    net.train()
    return loss


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = TinyLM()
    pretrain(net, rank)
    inject(net)
    model = DDP(net)
    trainable = [p for p in model.parameters() if p.requires_grad]
    if rank == 0:
        total = sum(p.numel() for p in model.parameters())
        print(f"trainable params: {sum(p.numel() for p in trainable)} || all params: {total}")
    opt = ZeroRedundancyOptimizer(trainable, optimizer_class=torch.optim.AdamW, lr=args.lr, weight_decay=0.0)
    train = TensorDataset(corpus(1024, 7, 2))
    val = corpus(128, 7, 3)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler, drop_last=True)
    stopper = EarlyStopping(args.patience, args.min_delta)
    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        tot = torch.zeros(2)
        for (b,) in loader:
            with torch.no_grad(), adapters_off(net):
                ref = F.log_softmax(net(b[:, :-1]), -1)
            logits = model(b[:, :-1])
            ce = F.cross_entropy(logits.reshape(-1, V), b[:, 1:].reshape(-1))
            kl = F.kl_div(F.log_softmax(logits, -1), ref, log_target=True, reduction="batchmean") / L
            loss = ce + args.kl * kl
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trainable, 1.0)
            opt.step()
            tot += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(tot)
        flags = torch.zeros(2, dtype=torch.int64)
        if rank == 0:
            v = val_loss(net, val)
            better, stop = stopper.step(v)
            flags = torch.tensor([int(better), int(stop)])
            print(json.dumps({"epoch": epoch, "train": (tot[0] / tot[1]).item(), "val": v}), flush=True)
        dist.broadcast(flags, src=0)
        if flags[0]:
            opt.consolidate_state_dict(to=0)
            if rank == 0:
                torch.save({"adapter": {k: v for k, v in net.state_dict().items() if "lora_" in k},
                            "optim": opt.state_dict(), "epoch": epoch}, "adapter_best.pt")
        if flags[1]:
            if rank == 0:
                print("early stop at", epoch)
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--max-epochs", type=int, default=14)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--kl", type=float, default=0.02)
    p.add_argument("--patience", type=int, default=2)
    p.add_argument("--min-delta", type=float, default=0.01)
    main(p.parse_args())
