import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, IterableDataset

PAD = 0
VOCAB = 40


class CountingStream(IterableDataset):
    """Arithmetic progressions modulo the vocabulary, of very different lengths."""

    def __init__(self, n, seed, rank):
        self.n, self.seed, self.rank, self.epoch = n, seed, rank, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 7919 + self.epoch * 131 + self.rank)
        for _ in range(self.n):
            length = int(torch.randint(6, 40, (1,), generator=g))
            start, step = torch.randint(1, VOCAB - 1, (2,), generator=g).tolist()
            step = step % 5 + 1
            yield (start + step * torch.arange(length)) % (VOCAB - 1) + 1


def collate(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


class GRULM(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, x):
        return self.head(self.rnn(self.emb(x))[0])


class Trainer:
    def __init__(self, model, lr):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = model
        for p in model.parameters():
            dist.broadcast(p.data, 0)
        self.opt = torch.optim.Adagrad(model.parameters(), lr=lr)

    def sum_loss(self, batch):
        inp, tgt = batch[:, :-1], batch[:, 1:]
        logits = self.model(inp)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), tgt.reshape(-1), ignore_index=PAD, reduction="sum")
        return loss, (tgt != PAD).sum()

    def sync_gradients(self, ntokens):
        grads = [p.grad for p in self.model.parameters()]
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        flat.div_(ntokens)
        for g, s in zip(grads, _unflatten_dense_tensors(flat, grads)):
            g.copy_(s)

    def step(self, batch):
        self.opt.zero_grad(set_to_none=False)
        loss, ntokens = self.sum_loss(batch)
        loss.backward()
        total = ntokens.clone().float()
        dist.all_reduce(total)
        self.sync_gradients(ntokens)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        return loss.detach(), total

    def run(self, stream, epochs, batch_size):
        for epoch in range(epochs):
            stream.epoch = epoch
            t0 = time.perf_counter()
            nll, tokens = torch.zeros(()), torch.zeros(())
            for batch in DataLoader(stream, batch_size=batch_size, collate_fn=collate):
                loss, total = self.step(batch)
                dist.all_reduce(loss)
                nll += loss
                tokens += total
            if self.rank == 0:
                print(f"epoch {epoch} nll/token {(nll / tokens).item():.4f} tok/s {tokens.item() / (time.perf_counter() - t0):.0f}",
                      flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    torch.manual_seed(5)
    trainer = Trainer(GRULM(), lr=0.05)
    trainer.run(CountingStream(480, seed=5, rank=trainer.rank), epochs=4, batch_size=16)
    if trainer.rank == 0:
        torch.save(trainer.model.state_dict(), os.path.join(os.getcwd(), "lm.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
