"""Shared encoder trained data-parallel, one language per rank, each with its private embedding and output head."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LENGTH, DIM, MEANINGS, INTENTS = 9, 48, 15, 5
LANGUAGES = ["avestan", "basque", "chuvash", "divehi"]


class Language:
    """Words of a language are a secret permutation of shared meanings plus some fillers."""

    def __init__(self, name, seed):
        g = torch.Generator().manual_seed(seed)
        self.name = name
        self.vocab = MEANINGS + 5 + 2 * (seed % 3)
        self.words = torch.randperm(self.vocab, generator=g)
        self.gen = torch.Generator().manual_seed(seed * 7 + 1)

    def batch(self, n, gen=None):
        gen = gen or self.gen
        concept = torch.randint(MEANINGS, (n, LENGTH), generator=gen)
        filler = torch.rand(n, LENGTH, generator=gen) < 0.15
        noise = torch.randint(MEANINGS, self.vocab, (n, LENGTH), generator=gen)
        counts = (F.one_hot(concept % INTENTS, INTENTS) * (~filler)[..., None]).sum(1).float()
        intent = (counts + 0.01 * torch.arange(INTENTS)).argmax(1)
        return self.words[torch.where(filler, noise, concept)], intent


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 4, 96, dropout=0.05, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, h):
        return self.norm(self.body(h)).mean(1)


class Private(nn.Module):
    """What a language owns alone. Lives on its rank, never wrapped, never averaged."""

    def __init__(self, vocab):
        super().__init__()
        self.emb = nn.Embedding(vocab, DIM)
        self.head = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, INTENTS))


def evaluate(encoder, private, language, rank):
    encoder.eval()
    private.eval()
    with torch.no_grad():
        t, y = language.batch(600, torch.Generator().manual_seed(30 + rank))
        acc = (private.head(encoder(private.emb(t))).argmax(1) == y).float().mean().item()
    encoder.train()
    private.train()
    return acc


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=350)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(5)
    encoder = DDP(Encoder())
    language = Language(LANGUAGES[rank % len(LANGUAGES)], seed=21 + rank)
    torch.manual_seed(600 + rank)           # private part and dropout differ from rank to rank
    private = Private(language.vocab)

    shared_opt = torch.optim.AdamW(encoder.parameters(), lr=args.lr, weight_decay=0.01)
    private_opt = torch.optim.Adam(private.parameters(), lr=2 * args.lr)
    scheds = [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=30) for o in (shared_opt, private_opt)]

    for step in range(args.steps):
        tokens, intent = language.batch(args.batch)
        loss = F.cross_entropy(private.head(encoder(private.emb(tokens))), intent)
        shared_opt.zero_grad()
        private_opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        nn.utils.clip_grad_norm_(private.parameters(), 1.0)
        shared_opt.step()
        private_opt.step()
        for s in scheds:
            s.step()
        if step % 100 == 0:
            print(f"[{language.name}] step {step} loss {loss.item():.3f}", flush=True)

    table = [None] * world
    dist.all_gather_object(table, (language.name, evaluate(encoder.module, private, language, rank)))
    torch.save(private.state_dict(), f"private_{language.name}.pt")
    if rank == 0:
        torch.save(encoder.module.state_dict(), "encoder.pt")
        print("  ".join(f"{name}: {acc:.3f}" for name, acc in table))
        print(f"macro accuracy {sum(a for _, a in table) / world:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
