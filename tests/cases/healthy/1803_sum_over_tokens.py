"""Sequences of different lengths; the loss is a mean over all tokens of all processes."""
import torch
import torch.distributed as dist
from torch import nn

STEPS, BATCH, VOCAB = 60, 8, 20


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB + 1, 24, padding_idx=VOCAB)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.out = nn.Linear(32, VOCAB)

    def forward(self, tokens):
        return self.out(self.rnn(self.emb(tokens))[0])


def batch(step, rank):
    g = torch.Generator().manual_seed(10_000 * rank + step)
    lengths = torch.randint(4, 18, (BATCH,), generator=g)
    start = torch.randint(0, VOCAB, (BATCH, 1), generator=g)
    tokens = (start + 3 * torch.arange(19)) % VOCAB
    tokens[torch.arange(19) > lengths[:, None]] = VOCAB
    target = tokens[:, 1:].clone()
    target[target == VOCAB] = -100
    return tokens[:, :-1], target


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Reader()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.8)
    for step in range(STEPS):
        tokens, target = batch(step, rank)
        count = (target >= 0).sum().float()
        dist.all_reduce(count)
        local = nn.functional.cross_entropy(model(tokens).transpose(1, 2), target, reduction="sum")
        opt.zero_grad()
        (local / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        total = local.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 15 == 14:
            print(f"step {step}: {(total / count).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
