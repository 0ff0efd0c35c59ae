"""A DDP subclass that lets one write model.anything, as some code bases do."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class TransparentDDP(DistributedDataParallel):
    """Attributes that DDP does not have are looked up in the wrapped module."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class Task(nn.Module):
    """What a step is; the runner below does not know about the model."""

    def training_step(self, batch):
        raise NotImplementedError

    def validation_step(self, batch):
        raise NotImplementedError

    def forward(self, batch, training=True):
        return self.training_step(batch) if training else self.validation_step(batch)


class DenseRetrieval(Task):
    def __init__(self, vocab=50, dim=24):
        super().__init__()
        self.query, self.doc = nn.EmbeddingBag(vocab, dim), nn.EmbeddingBag(vocab, dim)
        self.proj = nn.Linear(dim, dim)

    def scores(self, batch):
        q, d = batch
        return self.proj(self.query(q)) @ self.doc(d).T

    def training_step(self, batch):
        s = self.scores(batch)
        return nn.functional.cross_entropy(s, torch.arange(len(s)))

    def validation_step(self, batch):
        s = self.scores(batch)
        return (s.argmax(1) == torch.arange(len(s))).float().sum()


def corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    d = torch.randint(0, 50, (n, 8), generator=g)
    return TensorDataset(d[:, :3] * 7 % 50, d)


class Runner:
    def __init__(self, task, lr):
        self.model = TransparentDDP(task)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.rank = dist.get_rank()

    def fit(self, train, valid, epochs):
        sampler = DistributedSampler(train)
        loader = DataLoader(train, batch_size=16, sampler=sampler, drop_last=True)
        valid_loader = DataLoader(valid, batch_size=16, sampler=DistributedSampler(valid, shuffle=False))
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            self.model.train()
            for batch in loader:
                loss = self.model.training_step(batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.model.eval()
            with torch.no_grad():
                hits = sum(self.model(batch, training=False) for batch in valid_loader)
            dist.all_reduce(hits)
            if self.rank == 0:
                print(f"epoch {epoch}: recall@1 {hits.item() / len(valid):.3f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(33)
    Runner(DenseRetrieval(), lr=1e-2).fit(corpus(480, 1), corpus(64, 2), epochs=5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
