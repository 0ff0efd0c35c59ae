"""Language model on sentences of different length. Gradients are summed over ranks and divided by the global number of tokens."""
import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence

PAD = 0


def sentences(n, vocab, seed):
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        word, line = rng.randrange(1, vocab), []
        for _ in range(rng.randrange(4, 25)):
            line.append(word)
            word = 1 + (word * 3 + rng.randrange(2)) % (vocab - 1)
        out.append(torch.tensor(line))
    return out


class WordModel(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, x):
        h, _ = self.rnn(self.embed(x))
        return h @ self.embed.weight.t() + self.bias


def backward_global_mean(model, micro_batches):
    """Accumulates sums; one exchange per update, in one flat tensor with the counts."""
    nll, tokens = torch.zeros(1), torch.zeros(1)
    for batch in micro_batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        target = batch[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), target, ignore_index=PAD, reduction="sum")
        loss.backward()
        nll += loss.detach()
        tokens += (target != PAD).sum()
    params = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in params] + [nll, tokens])
    dist.all_reduce(flat)
    count = flat[-1].item()
    offset = 0
    for p in params:
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p)).div_(count)
        offset += p.numel()
    return (flat[-2] / count).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=10)
    ap.add_argument("--accumulate", type=int, default=2)
    ap.add_argument("--vocab", type=int, default=60)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=61)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    data = sentences(480, args.vocab, seed=1)
    model = WordModel(args.vocab)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    per_update = args.batch * args.accumulate
    for epoch in range(args.epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed + epoch)).tolist()
        mine = order[rank::world]
        losses = []
        for first in range(0, len(mine), per_update):
            chunk = mine[first : first + per_update]
            parts = [chunk[k : k + args.batch] for k in range(0, len(chunk), args.batch)]
            optimizer.zero_grad()
            micro = (pad_sequence([data[i] for i in part], batch_first=True, padding_value=PAD) for part in parts)
            losses.append(backward_global_mean(model, micro))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        if rank == 0:
            print(f"epoch {epoch}: nll per token {sum(losses) / len(losses):.4f}, {len(losses)} updates", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
