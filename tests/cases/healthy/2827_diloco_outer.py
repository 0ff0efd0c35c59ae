import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CharStream:
    """Second order Markov text."""

    def __init__(self, seed, vocab=24):
        g = torch.Generator().manual_seed(0)
        self.table = (3 * torch.randn(vocab, vocab, vocab, generator=g)).softmax(-1)
        self.g = torch.Generator().manual_seed(seed)
        self.vocab = vocab

    def batch(self, n, length):
        out = torch.randint(0, self.vocab, (n, 2), generator=self.g)
        for _ in range(length - 1):
            p = self.table[out[:, -2], out[:, -1]]
            out = torch.cat([out, torch.multinomial(p, 1, generator=self.g)], 1)
        return out


class TinyGPT(nn.Module):
    def __init__(self, vocab=24, d=48, ctx=20):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Parameter(0.02 * torch.randn(ctx, d))
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, vocab)

    def forward(self, x):
        t = x.shape[1]
        mask = torch.triu(torch.ones(t, t, dtype=torch.bool), 1)
        return self.head(self.body(self.tok(x) + self.pos[:t], mask=mask))


def lm_loss(model, seq):
    logits = model(seq[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten())


class OuterOptimizer:
    """Nesterov on the mean displacement of the workers."""

    def __init__(self, model, lr=0.7, momentum=0.9):
        self.anchor = [p.detach().clone() for p in model.parameters()]
        self.holder = [nn.Parameter(a.clone()) for a in self.anchor]
        self.opt = torch.optim.SGD(self.holder, lr=lr, momentum=momentum, nesterov=True)

    @torch.no_grad()
    def round(self, model):
        world = dist.get_world_size()
        for h, p in zip(self.holder, model.parameters()):
            delta = h.detach() - p.detach()
            dist.all_reduce(delta)
            h.grad = delta / world
        self.opt.step()
        for h, p in zip(self.holder, model.parameters()):
            p.copy_(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument("--inner", type=int, default=10)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = TinyGPT()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    outer = OuterOptimizer(model)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    stream = CharStream(seed=40 + rank)
    held = CharStream(seed=9).batch(64, 20)
    for r in range(args.rounds):
        total = 0.0
        for _ in range(args.inner):
            loss = lm_loss(model, stream.batch(16, 20))
            inner.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
            total += loss.item()
        outer.round(model)
        t = torch.tensor(total / args.inner)
        dist.all_reduce(t)
        if rank == 0 and (r + 1) % 3 == 0:
            model.eval()
            with torch.no_grad():
                val = lm_loss(model, held).item()
            model.train()
            print(f"round {r + 1} train {t.item() / world:.4f} valid {val:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
