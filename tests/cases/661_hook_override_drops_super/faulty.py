"""Training of a small character tagger; the loop lives in a base class with hooks."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class BaseLoop:
    """fit() and the hooks; subclasses say what a batch costs."""

    def __init__(self, model, loader, lr, epochs):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(model)
        self.loader = loader
        self.epochs = epochs
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def on_epoch_start(self, epoch):
        if isinstance(self.loader.sampler, DistributedSampler):
            self.loader.sampler.set_epoch(epoch)
        self.model.train()

    def on_epoch_end(self, epoch):
        pass

    def loss(self, batch):
        raise NotImplementedError

    def fit(self):
        for epoch in range(self.epochs):
            self.on_epoch_start(epoch)
            for batch in self.loader:
                loss = self.loss(batch)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                self.on_batch_end(loss)
            self.on_epoch_end(epoch)

    def on_batch_end(self, loss):
        pass


class Tagger(nn.Module):
    def __init__(self, vocab=30, tags=5, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, 32, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, tags)

    def forward(self, tokens):
        return self.out(self.rnn(self.emb(tokens))[0])


class TaggerLoop(BaseLoop):
    def on_epoch_start(self, epoch):
        self.stats = torch.zeros(2)
        self.model.train()

    def loss(self, batch):
        tokens, tags = batch
        logits = self.model(tokens)
        self.stats += torch.tensor([float((logits.argmax(-1) == tags).sum()), float(tags.numel())])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten())

    def on_epoch_end(self, epoch):
        dist.all_reduce(self.stats)
        if self.rank == 0:
            print(f"epoch {epoch}: token accuracy {(self.stats[0] / self.stats[1]).item():.3f}")


def sentences(n=360):
    g = torch.Generator().manual_seed(17)
    tokens = torch.randint(0, 30, (n, 9), generator=g)
    prev = torch.cat([torch.zeros(n, 1, dtype=torch.long), tokens[:, :-1]], 1)
    return TensorDataset(tokens, (tokens + prev) % 5)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ.get("SEED", "4")))
    data = sentences()
    loader = DataLoader(data, batch_size=20, sampler=DistributedSampler(data, shuffle=True))
    TaggerLoop(Tagger(), loader, lr=5e-3, epochs=5).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
