"""Next-token model with periodic checkpoints."""
import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def walks(n=640, length=12, vocab=400):
    g = torch.Generator().manual_seed(13)
    start = torch.randint(0, vocab, (n, 1), generator=g)
    stride = torch.randint(1, 5, (n, 1), generator=g)
    return TensorDataset((start + stride * torch.arange(length + 1)) % vocab)


class LM(nn.Module):
    def __init__(self, vocab=400, dim=320):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=40)
    ap.add_argument("--ckpt", default="lm.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(LM())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = walks()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    step = 0
    start = time.time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0 and step % args.save_every == 0:
                state = {"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step}
                torch.save(state, args.ckpt)
            step += 1
        if rank == 0:
            print(f"epoch {epoch}: {time.time() - start:.1f} s, loss {loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
