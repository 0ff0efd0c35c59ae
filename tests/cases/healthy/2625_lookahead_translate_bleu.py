"""Small translator with Lookahead over Adam; validation every k steps, by all ranks, BLEU from summed n-gram counts."""
import argparse
import collections
import math
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PAD, BOS, EOS = 0, 1, 2
NOUNS = ["dog", "cat", "bird", "tree", "car", "house", "king", "river"]
ADJS = ["red", "old", "big", "wise", "green", "slow"]
VERBS = ["sees", "likes", "finds", "has", "paints"]


def pairs(n, seed):
    """English in, a toy language out: adjectives follow nouns, the verb goes last."""
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        def phrase():
            n_, adj = rng.choice(NOUNS), rng.sample(ADJS, rng.randint(0, 2))
            return ["the", *adj, n_], [n_.upper(), *[a.upper() for a in adj]]
        (s, s2), (o, o2), v = phrase(), phrase(), rng.choice(VERBS)
        out.append((s + [v] + o, s2 + o2 + [v.upper()]))
    return out


def shared_vocabulary(data):
    """Rank 0 counts; the others receive the lists."""
    box = [None, None]
    if dist.get_rank() == 0:
        for k in range(2):
            words = collections.Counter(w for p in data for w in p[k])
            box[k] = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>"] + sorted(words))}
    dist.broadcast_object_list(box, src=0)
    return box


def pack(batch, sv, tv):
    src = [torch.tensor([sv[w] for w in s]) for s, _ in batch]
    tgt = [torch.tensor([BOS] + [tv[w] for w in t] + [EOS]) for _, t in batch]
    pad = nn.utils.rnn.pad_sequence
    return pad(src, batch_first=True), pad(tgt, batch_first=True)


class Translator(nn.Module):
    def __init__(self, ns, nt, dim=48):
        super().__init__()
        self.src, self.tgt = nn.Embedding(ns, dim, padding_idx=PAD), nn.Embedding(nt, dim, padding_idx=PAD)
        self.enc = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.dec = nn.GRU(dim, dim, batch_first=True)
        self.key = nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(0.1)
        self.mix = nn.Linear(2 * dim, dim)
        self.out = nn.Linear(dim, nt, bias=False)
        self.out.weight = self.tgt.weight

    def encode(self, src):
        return self.key(self.enc(self.drop(self.src(src)))[0]), src == PAD

    def decode(self, tgt, memory, state=None):
        keys, pad = memory
        h, state = self.dec(self.drop(self.tgt(tgt)), state)
        att = (h @ keys.transpose(1, 2)).masked_fill(pad[:, None], -1e9).softmax(-1)
        return self.out(torch.tanh(self.mix(torch.cat([h, att @ keys], -1)))), state

    def forward(self, src, tgt):
        return self.decode(tgt, self.encode(src))[0]

    @torch.no_grad()
    def greedy(self, src, limit=10):
        memory, state = self.encode(src), None
        word = torch.full((len(src), 1), BOS)
        words = []
        for _ in range(limit):
            logits, state = self.decode(word, memory, state)
            word = logits.argmax(-1)
            words.append(word)
        return torch.cat(words, 1)


class Lookahead:
    def __init__(self, inner, k=5, alpha=0.5):
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        self.params = [p for g in inner.param_groups for p in g["params"]]
        self.slow = [p.detach().clone() for p in self.params]

    def zero_grad(self):
        self.inner.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.count += 1
        if self.count % self.k == 0:
            for p, s in zip(self.params, self.slow):
                s.lerp_(p, self.alpha)
                p.copy_(s)


def cut(ids):
    return ids[:ids.index(EOS)] if EOS in ids else ids


def bleu(net, data, sv, tv, rank, world):
    net.eval()
    stats = torch.zeros(10, dtype=torch.float64)     # matches 1-4, totals 1-4, lengths
    mine = data[rank::world]
    for k in range(0, len(mine), 50):
        src, tgt = pack(mine[k:k + 50], sv, tv)
        for hyp, ref in zip(net.greedy(src).tolist(), tgt[:, 1:].tolist()):
            hyp, ref = cut(hyp), cut(ref)
            stats[8] += len(hyp)
            stats[9] += len(ref)
            for n in range(4):
                grams = [collections.Counter(tuple(x[i:i + n + 1]) for i in range(len(x) - n)) for x in (hyp, ref)]
                stats[n] += sum((grams[0] & grams[1]).values())
                stats[4 + n] += sum(grams[0].values())
    net.train()
    dist.all_reduce(stats)
    logs = (stats[:4].clamp(min=1e-9) / stats[4:8].clamp(min=1)).log().mean()
    brevity = min(0.0, 1 - (stats[9] / stats[8].clamp(min=1)).item())
    return 100 * math.exp(logs.item() + brevity)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=270)
    ap.add_argument("--every", type=int, default=90)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = pairs(4000, 1), pairs(151, 2)
    sv, tv = shared_vocabulary(train)
    torch.manual_seed(25)
    net = Translator(len(sv), len(tv))
    nn.init.normal_(net.tgt.weight, std=0.1)
    model = DDP(net)
    torch.manual_seed(2500 + rank)
    opt = Lookahead(torch.optim.Adam(net.parameters(), lr=6e-3))
    mine, epoch, queue = train[rank::world], 0, []
    for step in range(1, args.steps + 1):
        if len(queue) < 32:
            queue = random.Random(epoch * world + rank).sample(mine, len(mine))
            epoch += 1
        src, tgt = pack([queue.pop() for _ in range(32)], sv, tv)
        logits = model(src, tgt[:, :-1])
        # a mean over the tokens of all ranks, though each has a number of its own
        tokens = (tgt[:, 1:] != PAD).sum().float()
        everyone = tokens.clone()
        dist.all_reduce(everyone)
        nll = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
        loss = nll * world / everyone
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if step % args.every == 0:
            mean = nll.detach().clone()
            dist.all_reduce(mean)
            score = bleu(net, test, sv, tv, rank, world)
            if rank == 0:
                print(f"step {step} nll {(mean / everyone).item():.3f} BLEU {score:.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
