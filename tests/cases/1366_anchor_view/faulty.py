"""Low-communication language-model training: local steps inside, an averaged outer step between."""
import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

TEXT = ("the quick brown fox jumps over the lazy dog while the small grey cat looks at the old brown dog and "
        "the lazy fox sleeps under the tall green tree near the quiet river where the old man reads a small book ")


class CharVocab:
    def __init__(self, text):
        self.chars = sorted(set(text))
        self.index = {c: i for i, c in enumerate(self.chars)}

    def encode(self, text):
        return torch.tensor([self.index[c] for c in text])

    def decode(self, ids):
        return "".join(self.chars[int(i)] for i in ids)

    def __len__(self):
        return len(self.chars)


class Windows(Dataset):
    def __init__(self, ids, length):
        self.ids, self.length = ids, length

    def __len__(self):
        return (len(self.ids) - 1) // 5 - self.length // 5

    def __getitem__(self, i):
        chunk = self.ids[5 * i:5 * i + self.length + 1]
        return chunk[:-1], chunk[1:]


class CharLM(nn.Module):
    def __init__(self, vocab, width=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab)

    def forward(self, x, state=None):
        h, state = self.rnn(self.embed(x), state)
        return self.out(self.norm(h)), state


class OuterOptimizer:
    """Keeps the weights of the last exchange and moves them by the mean change of all workers."""

    def __init__(self, model, lr, momentum):
        self.params = list(model.parameters())
        self.anchor = [p.detach() for p in self.params]
        self.sgd = torch.optim.SGD(self.anchor, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.bytes = 0

    @torch.no_grad()
    def exchange(self):
        world = dist.get_world_size()
        for a, p in zip(self.anchor, self.params):
            delta = a - p
            dist.all_reduce(delta)
            a.grad = delta.div_(world)
            self.bytes += delta.numel() * delta.element_size()
        self.sgd.step()
        for a, p in zip(self.anchor, self.params):
            p.copy_(a)


class BatchStream:
    def __init__(self, dataset, batch_size, seed):
        self.sampler = DistributedSampler(dataset, shuffle=True, seed=seed, drop_last=True)
        self.loader = DataLoader(dataset, batch_size, sampler=self.sampler, drop_last=True)
        self.epoch = 0
        self.iterator = None

    def next(self):
        while True:
            if self.iterator is None:
                self.sampler.set_epoch(self.epoch)
                self.iterator = iter(self.loader)
            try:
                return next(self.iterator)
            except StopIteration:
                self.iterator = None
                self.epoch += 1


def cosine(step, total, base):
    return base * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / total)))


class Worker:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.vocab = CharVocab(TEXT)
        ids = self.vocab.encode(TEXT * 20)
        self.stream = BatchStream(Windows(ids, args.length), args.batch_size, args.seed)
        torch.manual_seed(args.seed)
        self.model = CharLM(len(self.vocab))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)
        self.outer = OuterOptimizer(self.model, args.outer_lr, args.outer_momentum)
        self.done = 0

    def local_step(self):
        x, y = self.stream.next()
        for group in self.inner.param_groups:
            group["lr"] = cosine(self.done, self.args.rounds * self.args.local_steps, self.args.lr)
        logits, _ = self.model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.inner.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.inner.step()
        self.done += 1
        return loss.item()

    def run(self):
        start = time.time()
        for r in range(self.args.rounds):
            losses = [self.local_step() for _ in range(self.args.local_steps)]
            self.outer.exchange()
            mean = torch.tensor([sum(losses) / len(losses)])
            dist.all_reduce(mean)
            if self.rank == 0:
                print(f"round {r}: local loss {mean.item() / self.world:.4f}, {self.outer.bytes / 1e6:.2f} MB sent, "
                      f"{time.time() - start:.1f} s", flush=True)

    @torch.no_grad()
    def sample(self, n=60):
        ids, state, out = torch.tensor([[self.vocab.index["t"]]]), None, []
        for _ in range(n):
            logits, state = self.model(ids, state)
            ids = logits[:, -1].argmax(1, keepdim=True)
            out.append(ids.item())
        return self.vocab.decode(out)

    def finish(self):
        if self.rank == 0:
            print("sample:", self.sample())
            torch.save({"model": self.model.state_dict(), "chars": self.vocab.chars}, self.args.out)
        dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--local-steps", type=int, default=10)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--length", type=int, default=30)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--outer-lr", type=float, default=0.7)
    p.add_argument("--outer-momentum", type=float, default=0.6)
    p.add_argument("--seed", type=int, default=2)
    p.add_argument("--out", default="charlm.pt")
    args = p.parse_args()
    dist.init_process_group("gloo")
    worker = Worker(args)
    worker.run()
    worker.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
