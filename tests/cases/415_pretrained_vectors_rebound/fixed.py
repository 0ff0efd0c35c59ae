"""Sentence pair scorer with pretrained word vectors."""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class PairScorer(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.project = nn.Linear(dim, dim, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def encode(self, ids):
        mask = (ids > 0).unsqueeze(-1)
        mean = (self.embed(ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return nn.functional.normalize(self.project(mean), dim=-1)

    def forward(self, a, b):
        return (self.encode(a) * self.encode(b)).sum(-1) * self.temperature * 5


def read_vectors(vocab, dim):
    """stands for a glove file"""
    rng = np.random.default_rng(4)
    table = rng.normal(scale=0.4, size=(vocab, dim)).astype("float32")
    table[0] = 0
    return table


def load_vectors(net, table):
    vectors = torch.from_numpy(table)
    assert vectors.shape == net.embed.weight.shape, vectors.shape
    with torch.no_grad():
        net.embed.weight.copy_(vectors)
    return net


class Experiment:
    def __init__(self, vocab=60, dim=24, lr=0.02):
        torch.manual_seed(9)
        self.vocab, self.dim = vocab, dim
        self.net = PairScorer(vocab, dim)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, total_iters=10)

    def warm_start(self):
        load_vectors(self.net, read_vectors(self.vocab, self.dim))

    def pairs(self, seed, batch=48):
        g = torch.Generator().manual_seed(seed)
        while True:
            a = torch.randint(1, self.vocab, (batch, 5), generator=g)
            b = torch.randint(1, self.vocab, (batch, 5), generator=g)
            same = torch.rand(batch, generator=g) < 0.5
            b[same] = (a[same] % 2 + a[same]).clamp(max=self.vocab - 1)
            yield a, b, same.float()

    def run(self, steps=50):
        model = DDP(self.net)
        for step, (a, b, y) in zip(range(steps), self.pairs(30 + dist.get_rank())):
            loss = nn.functional.binary_cross_entropy_with_logits(model(a, b), y)
            model.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    exp = Experiment()
    exp.warm_start()
    final = exp.run()
    if os.environ["RANK"] == "0":
        print(f"loss {final:.4f}")
    dist.destroy_process_group()
