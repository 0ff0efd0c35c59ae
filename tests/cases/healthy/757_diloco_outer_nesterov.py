import os
import copy
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

# DiLoCo: H inner AdamW steps alone, then the pseudo-gradient (start - now) is averaged and an outer Nesterov SGD steps.
H, OUTER, B, T, V = 8, 8, 8, 16, 24


class TinyLM(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.tok = nn.Embedding(V, d)
        self.pos = nn.Parameter(torch.zeros(T, d))
        self.blk = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(d, V, bias=False)
        self.out.weight = self.tok.weight

    def forward(self, x):
        m = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.out(self.blk(self.tok(x) + self.pos, src_mask=m, is_causal=True))


def stream(rank):
    g = torch.Generator().manual_seed(31 + 7 * rank)
    while True:
        s = torch.randint(0, V, (B, 1), generator=g)
        k = torch.randint(1, 5, (B, 1), generator=g)
        seq = (s + k * torch.arange(T + 1)) % V
        yield seq[:, :-1], seq[:, 1:]


def run():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    local = TinyLM()
    for p in local.parameters():
        dist.broadcast(p.data, 0)
    anchor = copy.deepcopy(local)
    inner = torch.optim.AdamW(local.parameters(), lr=3e-3, weight_decay=0.01)
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    data = stream(rank)
    for o in range(OUTER):
        losses = []
        for _ in range(H):
            x, y = next(data)
            loss = F.cross_entropy(local(x).flatten(0, 1), y.flatten())
            inner.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(local.parameters(), 1.0)
            inner.step()
            losses.append(loss.item())
        outer.zero_grad()
        for a, p in zip(anchor.parameters(), local.parameters()):
            delta = a.detach() - p.detach()
            dist.all_reduce(delta)
            a.grad = delta / world
        outer.step()
        with torch.no_grad():
            for a, p in zip(anchor.parameters(), local.parameters()):
                p.copy_(a)
        m = torch.tensor([sum(losses) / H])
        dist.all_reduce(m)
        if rank == 0:
            print(f"round {o}: inner loss {m.item() / world:.3f}")
    dist.destroy_process_group()


run()
