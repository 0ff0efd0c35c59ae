"""DiLoCo on a toy language: each rank trains alone for H steps with AdamW, then an outer Nesterov step moves the common weights."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, CTX = 24, 16


class TinyLM(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCAB, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def corpus(rank):
    """Non-IID on purpose: each site has its own language (its own transition table)."""
    g = torch.Generator().manual_seed(900 + rank)
    table = torch.softmax(2.5 * torch.randn(VOCAB, VOCAB, generator=g), 1)
    seq = [0]
    for _ in range(3000):
        seq.append(torch.multinomial(table[seq[-1]], 1, generator=g).item())
    return torch.tensor(seq)


def batches(data, size, gen):
    while True:
        start = torch.randint(0, len(data) - CTX - 1, (size,), generator=gen)
        idx = start[:, None] + torch.arange(CTX + 1)
        yield data[idx]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--inner", type=int, default=12)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = TinyLM()
    anchor = [p.detach().clone() for p in model.parameters()]
    for p in anchor:
        p.grad = torch.zeros_like(p)
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    inner = torch.optim.AdamW(model.parameters(), lr=4e-3)  # its moments stay on the site, never averaged
    stream = batches(corpus(rank), 16, torch.Generator().manual_seed(rank))

    for rnd in range(args.rounds):
        total = 0.0
        for _ in range(args.inner):
            tokens = next(stream)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            inner.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a local step: there is nothing to average first
            inner.step()
            total += loss.item()
        drift = 0.0
        for slow, fast in zip(anchor, model.parameters()):
            delta = slow - fast.detach()
            drift += delta.square().sum().item()
            dist.all_reduce(delta)
            slow.grad.copy_(delta / world)
        outer.step()
        with torch.no_grad():
            for slow, fast in zip(anchor, model.parameters()):
                fast.copy_(slow)
        stats = torch.tensor([total / args.inner, drift])
        gathered = [torch.empty(2) for _ in range(world)]
        dist.all_gather(gathered, stats)
        if rank == 0:
            line = " ".join(f"site{i}: loss {g[0]:.3f} drift {g[1]:.3f}" for i, g in enumerate(gathered))
            print(f"round {rnd}: {line}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
