"""Span extraction ("question answering") with gradient accumulation under DDP."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Spans(Dataset):
    """A marker word opens the answer, another one closes it."""

    def __init__(self, n=512, length=20, vocab=60):
        g = torch.Generator().manual_seed(26)
        self.ids = torch.randint(10, vocab, (n, length), generator=g)
        self.start = torch.randint(0, length - 5, (n,), generator=g)
        self.end = self.start + torch.randint(1, 5, (n,), generator=g)
        rows = torch.arange(n)
        self.ids[rows, self.start] = torch.randint(1, 4, (n,), generator=g)
        self.ids[rows, self.end] = torch.randint(4, 7, (n,), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.start[i], self.end[i]


class SpanModel(nn.Module):
    def __init__(self, vocab=60, dim=40):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.qa = nn.Linear(2 * dim, 2)

    def forward(self, ids):
        return self.qa(self.rnn(self.emb(ids))[0]).unbind(2)


def train(args, dataset, model, rank):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.per_gpu_train_batch_size, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    global_step = 0
    model.zero_grad()
    for epoch in range(args.num_train_epochs):
        sampler.set_epoch(epoch)
        tr_loss, norms = torch.zeros(1), []
        for step, (ids, start, end) in enumerate(loader):
            update = (step + 1) % args.gradient_accumulation_steps == 0
            with contextlib.nullcontext() if update else model.no_sync():
                start_logits, end_logits = model(ids)
                loss = (F.cross_entropy(start_logits, start) + F.cross_entropy(end_logits, end)) / 2
                loss = loss / args.gradient_accumulation_steps
                loss.backward()
            tr_loss += loss.detach()
            if update:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).item())
                optimizer.step()
                model.zero_grad()
                global_step += 1
        dist.all_reduce(tr_loss)
        if rank == 0:
            mean = tr_loss.item() * args.gradient_accumulation_steps / len(loader) / dist.get_world_size()
            print(f"epoch {epoch}: loss {mean:.4f}, largest norm {max(norms):.3f}, step {global_step}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--num_train_epochs", type=int, default=4)
    ap.add_argument("--per_gpu_train_batch_size", type=int, default=16)
    ap.add_argument("--gradient_accumulation_steps", type=int, default=4)
    ap.add_argument("--learning_rate", type=float, default=8e-3)
    ap.add_argument("--max_grad_norm", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    train(args, Spans(), DDP(SpanModel()), rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
