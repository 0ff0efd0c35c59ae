"""Language model with two optimizers: AdamW steps at home, an outer Nesterov step on the averaged change every H steps."""
import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WORDS = "sun rain wind snow fog hill lake road farm mill crow fox elm oak rye hay".split()


def corpus(length, seed):
    """A word chain: each word has three likely successors."""
    follow = {w: random.Random(i).sample(range(len(WORDS)), 3) for i, w in enumerate(WORDS)}
    rng, now, out = random.Random(seed), 0, []
    for _ in range(length):
        now = rng.choice(follow[WORDS[now]]) if rng.random() < 0.95 else rng.randrange(len(WORDS))
        out.append(now)
    return torch.tensor(out)


class Decoder(nn.Module):
    def __init__(self, vocab, dim=48, context=24):
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, ids):
        n = ids.shape[1]
        x = self.token(ids) + self.place.weight[:n]
        return self.head(self.blocks(x, mask=self.mask[:n, :n], is_causal=True))


class OuterOptimizer:
    """Holds the state of the last synchronisation on the offload device and steps it."""

    def __init__(self, model, lr=0.7, momentum=0.9, offload="cpu"):
        self.live = list(model.parameters())
        self.kept = [nn.Parameter(p.detach().to(offload, copy=True)) for p in self.live]
        self.optimizer = torch.optim.SGD(self.kept, lr=lr, momentum=momentum, nesterov=True)

    @torch.no_grad()
    def step(self):
        for kept, live in zip(self.kept, self.live):
            change = kept - live.to(kept.device)
            dist.all_reduce(change)
            kept.grad = change / dist.get_world_size()
        self.optimizer.step()
        for kept, live in zip(self.kept, self.live):
            live.copy_(kept)
        self.optimizer.zero_grad()


def draw(text, batch, context, gen):
    start = torch.randint(len(text) - context - 1, (batch,), generator=gen)
    rows = text[start[:, None] + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def held_out(model, text, context):
    model.eval()
    rows = text[: len(text) // (context + 1) * (context + 1)].view(-1, context + 1)
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    model.train()
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--inner-steps", type=int, default=12)
    parser.add_argument("--context", type=int, default=24)
    parser.add_argument("--batch", type=int, default=24)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(77)
    model = Decoder(len(WORDS))
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    text = corpus(20000, seed=rank)
    check = corpus(1500, seed=999)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = OuterOptimizer(model)
    gen = torch.Generator().manual_seed(10 + rank)

    for number in range(args.rounds):
        total = 0.0
        for _ in range(args.inner_steps):
            ids, nxt = draw(text, args.batch, args.context, gen)
            loss = F.cross_entropy(model(ids).flatten(0, 1), nxt.flatten())
            inner.zero_grad()
            loss.backward()
            inner.step()
            total += loss.item() / args.inner_steps
        outer.step()
        pair = torch.stack([torch.tensor(total), held_out(model, check, args.context)])
        dist.all_reduce(pair)
        pair /= dist.get_world_size()
        if rank == 0:
            print(f"round {number}: inner loss {pair[0]:.4f}, held out {pair[1]:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
