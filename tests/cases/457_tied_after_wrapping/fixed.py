"""Masked denoiser with tied input and output embeddings."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Denoiser(nn.Module):
    MASK = 0

    def __init__(self, vocab=24, dim=32):
        super().__init__()
        self.encoder = nn.Embedding(vocab, dim)
        self.mix = nn.Conv1d(dim, dim, 5, padding=2)
        self.norm = nn.LayerNorm(dim)
        self.decoder = nn.Linear(dim, vocab)

    def tie_weights(self):
        self.decoder.weight = self.encoder.weight
        return self

    def forward(self, ids):
        h = self.encoder(ids)
        h = h + torch.relu(self.mix(h.transpose(1, 2))).transpose(1, 2)
        return self.decoder(self.norm(h))


class Factory:
    """builds things from names, remembers what it built"""

    def __init__(self, rank):
        self.rank, self.built = rank, {}

    def model(self):
        torch.manual_seed(31)
        net = Denoiser()
        nn.init.normal_(net.encoder.weight, std=0.3)
        self.built["net"] = net
        net.tie_weights()
        return DDP(net)

    def optimizer(self, model):
        unique = {id(p): p for p in model.parameters()}
        return torch.optim.AdamW(unique.values(), lr=4e-3)


def cycles(rank, batch=16, length=20):
    g = torch.Generator().manual_seed(rank)
    while True:
        start = torch.randint(0, 23, (batch, 1), generator=g)
        step = torch.randint(1, 4, (batch, 1), generator=g)
        clean = 1 + (start + step * torch.arange(length)) % 23
        hide = torch.rand(batch, length, generator=g) < 0.2
        yield clean.masked_fill(hide, Denoiser.MASK), clean, hide


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    factory = Factory(rank)
    model = factory.model()
    opt = factory.optimizer(model)
    for step, (ids, clean, hide) in zip(range(40), cycles(rank)):
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits[hide], clean[hide])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            total = loss.detach()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1}: {total.item() / dist.get_world_size():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
