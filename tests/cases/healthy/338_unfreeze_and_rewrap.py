"""Head first, then the whole network: DDP and the optimizer are made anew when the set of trainable weights changes."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tagger(nn.Module):
    """Shared embedding in and out, a frozen 'pretrained' body at first."""

    def __init__(self, vocab=24, d=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.body = nn.LSTM(d, d, batch_first=True)
        self.head = nn.Linear(d, d)
        self.project = nn.Linear(d, vocab, bias=False)
        self.project.weight = self.embed.weight

    def forward(self, ids):
        h, _ = self.body(self.embed(ids))
        return self.project(torch.relu(self.head(h)))


def next_symbol(n, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(24, (n, 1), generator=g)
    step = torch.randint(1, 4, (n, 1), generator=g)
    seq = (start + step * torch.arange(10)) % 24
    return TensorDataset(seq[:, :-1], seq[:, 1:])


def wrap(model, **kw):
    trainable = [p for p in model.parameters() if p.requires_grad]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **kw)
    return ddp, torch.optim.Adam(trainable, lr=1e-2)


def run(ddp, opt, loader, sampler, epochs):
    for epoch in epochs:
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad(set_to_none=False)
            loss = nn.functional.cross_entropy(ddp(x).flatten(0, 1), y.flatten())
            loss.backward()
            opt.step()
            seen += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(seen)
        if dist.get_rank() == 0:
            n = sum(p.numel() for g in opt.param_groups for p in g["params"])
            print(f"epoch {epoch}: {n} trainable weights, loss {seen[0] / seen[1]:.4f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ["RANK"]))  # DDP's broadcast makes the start common, frozen body included
    model = Tagger()
    data = next_symbol(384, 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 24, sampler=sampler)

    model.body.requires_grad_(False)
    ddp, opt = wrap(model)
    run(ddp, opt, loader, sampler, range(0, 2))

    del ddp, opt
    model.body.requires_grad_(True)
    model.zero_grad()
    ddp, opt = wrap(model, static_graph=True)
    run(ddp, opt, loader, sampler, range(2, 5))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
