"""Char LM with truncated BPTT over two chunks: the hidden state is carried (detached) from batch to batch, each rank reads its own columns."""
import argparse, math
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class CharLM(nn.Module):
    def __init__(self, v, d=32, h=48):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.rnn = nn.LSTM(d, h, 1)
        self.dec = nn.Linear(h, v)

    def forward(self, x, hc):
        o, hc = self.rnn(self.emb(x), hc)
        return self.dec(o), hc


def detach(hc):
    return tuple(t.detach() for t in hc)


def corpus(n=12000):
    words = ["abba", "cacao", "dodo", "ember", "fig"]
    g = torch.Generator().manual_seed(4)
    s = " ".join(words[i] for i in torch.randint(0, 5, (n // 5,), generator=g).tolist())
    chars = sorted(set(s))
    return torch.tensor([chars.index(c) for c in s]), len(chars)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--bptt", type=int, default=20)
    p.add_argument("--columns", type=int, default=32)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ids, V = corpus()
    n = len(ids) // args.columns
    cols = ids[: n * args.columns].view(args.columns, n).t()           # time x columns
    mine = cols[:, rank::world].contiguous()
    torch.manual_seed(0)
    model = DDP(CharLM(V))
    opt = torch.optim.Adam(model.parameters(), 4e-3)
    for epoch in range(3):
        hc = (torch.zeros(1, mine.size(1), 48), torch.zeros(1, mine.size(1), 48))
        total, count = 0.0, 0
        for i in range(0, mine.size(0) - 1 - args.bptt, args.bptt):
            x, y = mine[i:i + args.bptt], mine[i + 1:i + 1 + args.bptt]
            out, hc = model(x, detach(hc))
            loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            total += loss.item(); count += 1
        t = torch.tensor([total, count])
        dist.all_reduce(t)
        if rank == 0:
            print(f"epoch {epoch} bpc {t[0] / t[1] / math.log(2):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
