"""Character model of generated sentences; a second call goes on from the newest checkpoint."""
import argparse
import os
from glob import glob

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NOUNS = "cat dog bird fish mouse horse".split()
VERBS = "sees likes hears follows finds".split()


def make_text(sentences, seed):
    g = torch.Generator().manual_seed(seed)

    def pick(words):
        return words[int(torch.randint(0, len(words), (), generator=g))]

    return " ".join(f"the {pick(NOUNS)} {pick(VERBS)} the {pick(NOUNS)}." for _ in range(sentences))


class CharLM(nn.Module):
    def __init__(self, vocab, width=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        out, _ = self.rnn(self.emb(ids))
        return self.head(out)


def epoch_batches(ids, epoch, rank, world, batch=16, length=32, count=6):
    g = torch.Generator().manual_seed(10_000 + epoch)
    starts = torch.randint(0, len(ids) - length - 1, (count * batch * world,), generator=g)
    for chunk in starts[rank::world].split(batch):
        window = torch.stack([ids[s : s + length + 1] for s in chunk.tolist()])
        yield window[:, :-1], window[:, 1:]


def latest(folder):
    files = sorted(glob(os.path.join(folder, "epoch_*.pt")), key=lambda f: int(f.rsplit("_", 1)[1][:-3]))
    return files[-1] if files else None


def run(args, until, rank, world):
    text = make_text(600, seed=1)
    chars = sorted(set(text))
    ids = torch.tensor([chars.index(c) for c in text])
    torch.manual_seed(0)
    model = DistributedDataParallel(CharLM(len(chars)))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.96)
    first = 0

    path = latest(args.folder)
    if path is not None:
        state = torch.load(path, map_location="cpu")
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        first = state["epoch"] + 1
        if rank == 0:
            print(f"continuing from {path}", flush=True)
    dist.barrier()

    for epoch in range(first, until):
        total = torch.zeros(2)
        for x, y in epoch_batches(ids, epoch, rank, world):
            loss = nn.functional.cross_entropy(model(x).transpose(1, 2), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        sched.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
            torch.save(
                {"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "epoch": epoch},
                os.path.join(args.folder, f"epoch_{epoch}.pt"),
            )
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--folder", default="charlm")
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    os.makedirs(args.folder, exist_ok=True)
    run(args, 12, rank, world)
    run(args, 15, rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
