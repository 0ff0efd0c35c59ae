"""Sequence tagger trained in two sessions; each session spawns its own workers and goes on from the last file."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WORLD = 2
VOCAB, TAGS, LENGTH = 24, 5, 18
CKPT = "tagger.ckpt"


class TaggedSequences(Dataset):
    """A token's tag depends on itself and on the token before it."""

    def __init__(self, n=1200):
        g = torch.Generator().manual_seed(31)
        self.tokens = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
        table = torch.randint(0, TAGS, (VOCAB, VOCAB), generator=g)
        before = torch.roll(self.tokens, 1, dims=1)
        before[:, 0] = 0
        self.tags = table[before, self.tokens]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], self.tags[i]


class Tagger(nn.Module):
    def __init__(self, dim=32, hidden=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, TAGS)

    def forward(self, tokens):
        h, _ = self.rnn(self.emb(tokens))
        return self.out(h)


def restore(net):
    if not os.path.exists(CKPT):
        return None
    state = torch.load(CKPT, map_location="cpu")
    net.load_state_dict(state["net"])
    return state


def save(net, opt, epoch):
    tmp = CKPT + ".tmp"
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "next_epoch": epoch + 1}, tmp)
    os.replace(tmp, CKPT)


def worker(rank, sync_file, until):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sync_file}", rank=rank, world_size=WORLD)
    torch.manual_seed(1234)

    net = Tagger()
    state = restore(net)
    model = DistributedDataParallel(net)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = 0
    if state is not None:
        if rank == 0:
            opt.load_state_dict(state["opt"])
        first = state["next_epoch"]

    data = TaggedSequences()
    sampler = DistributedSampler(data, WORLD, rank, shuffle=True, seed=4)
    loader = DataLoader(data, batch_size=25, sampler=sampler)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(first, until):
        sampler.set_epoch(epoch)
        stat = torch.zeros(3)
        for tokens, tags in loader:
            logits = model(tokens)
            loss = loss_fn(logits.reshape(-1, TAGS), tags.reshape(-1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            hits = (logits.argmax(-1) == tags).sum().item()
            stat += torch.tensor([loss.item() * tags.numel(), hits, tags.numel()])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch}: loss {stat[0] / stat[2]:.4f} train acc {stat[1] / stat[2]:.4f}", flush=True)
            save(net, opt, epoch)
        dist.barrier()
    dist.destroy_process_group()


def session(until):
    with tempfile.TemporaryDirectory(dir=".") as d:
        mp.spawn(worker, args=(os.path.abspath(os.path.join(d, "sync")), until), nprocs=WORLD, join=True)


if __name__ == "__main__":
    if os.path.exists(CKPT):
        os.remove(CKPT)
    session(until=3)
    session(until=6)
