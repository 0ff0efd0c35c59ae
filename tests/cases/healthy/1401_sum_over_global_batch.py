"""Sentence length model with batches of unequal token counts and hand-written gradient exchange."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def sentences(n=240):
    g = torch.Generator().manual_seed(15)
    out = []
    for _ in range(n):
        size = int(torch.randint(3, 11, (), generator=g))
        ids = (int(torch.randint(1, 12, (), generator=g)) + 2 * torch.arange(size + 1)) % 11 + 1
        out.append(ids)
    return out


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(12, 16, padding_idx=0)
        self.rnn = nn.LSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, 12)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def exchange(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(2)
    model = Tagger()
    data = sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler, collate_fn=lambda b: pad_sequence(b, batch_first=True))
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for ids in loader:
            inp, target = ids[:, :-1], ids[:, 1:]
            loss_sum = nn.functional.cross_entropy(model(inp).transpose(1, 2), target, ignore_index=0, reduction="sum")
            tokens = (target != 0).sum().float()
            dist.all_reduce(tokens)
            opt.zero_grad()
            (loss_sum / tokens).backward()
            exchange(model)
            opt.step()
        total = (loss_sum / tokens).detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss per token {total.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
