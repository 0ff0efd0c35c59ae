"""Sequence tagger whose gradients travel in a single message."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    vocab: int = 20
    length: int = 12
    hidden: int = 24
    samples: int = 320
    batch_size: int = 16
    epochs: int = 4
    lr: float = 1e-2
    seed: int = 17


class Tagger(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.hidden)
        self.rnn = nn.GRU(cfg.hidden, cfg.hidden, batch_first=True)
        self.tag = nn.Linear(cfg.hidden, 2)

    def forward(self, tokens):
        return self.tag(self.rnn(self.embed(tokens))[0])


class Communicator:
    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.world = dist.get_world_size()

    def same_start(self):
        flat = parameters_to_vector(self.params).detach()
        dist.broadcast(flat, src=0)
        vector_to_parameters(flat, self.params)

    def mean_gradients(self):
        grads = [p.grad for p in self.params]
        flat = parameters_to_vector(grads)
        dist.all_reduce(flat)
        flat /= self.world


def make_data(cfg):
    g = torch.Generator().manual_seed(cfg.seed)
    tokens = torch.randint(0, cfg.vocab, (cfg.samples, cfg.length), generator=g)
    running = torch.cumsum((tokens < cfg.vocab // 2).long(), dim=1)
    return TensorDataset(tokens, running % 2)


def main(cfg):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(cfg.seed)
    model = Tagger(cfg)
    comm = Communicator(model)
    comm.same_start()
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    data = make_data(cfg)
    sampler = DistributedSampler(data, seed=cfg.seed)
    loader = DataLoader(data, batch_size=cfg.batch_size, sampler=sampler)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        correct = torch.zeros(2)
        for tokens, tags in loader:
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten())
            optimizer.zero_grad()
            loss.backward()
            comm.mean_gradients()
            optimizer.step()
            correct += torch.tensor([(logits.argmax(2) == tags).sum().item(), tags.numel()])
        dist.all_reduce(correct)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {(correct[0] / correct[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
