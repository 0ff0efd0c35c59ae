"""Train a patch transformer with the update fused into the backward pass, so that gradients never pile up in memory."""
import logging
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CFG = {"lr": 0.03, "momentum": 0.9, "batch": 32, "epochs": 5, "n": 512, "dim": 48, "layers": 2, "seed": 0}
log = logging.getLogger("fused")


class PatchTransformer(nn.Module):
    def __init__(self, dim, layers, classes=6, patch=4, side=16):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, dim))
        block = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        p = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        return self.head(self.blocks(self.embed(p) + self.pos).mean(1))


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(6, 1, 16, 16, generator=torch.Generator().manual_seed(77))
    y = torch.randint(0, 6, (n,), generator=g)
    x = prototypes[y] + 1.6 * torch.randn(n, 1, 16, 16, generator=g)
    return TensorDataset(x, y)


class FusedSGD:
    """One optimizer per parameter."""

    def __init__(self, params, **kw):
        self.by_param = {p: torch.optim.SGD([p], **kw) for p in params if p.requires_grad}
        self.handles = []

    def update(self, p):
        self.by_param[p].step()
        self.by_param[p].zero_grad()

    def install(self):
        for p in self.by_param:
            self.handles.append(p.register_post_accumulate_grad_hook(self.update))

    def close(self):
        while self.handles:
            self.handles.pop().remove()

    def step(self):
        for p in self.by_param:
            self.update(p)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = torch.zeros(2)
    for x, y in loader:
        hits += torch.tensor([(model(x).argmax(1) == y).float().sum(), len(y)])
    dist.all_reduce(hits)
    model.train()
    return (hits[0] / hits[1]).item()


def run():
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(CFG["seed"])
    model = DDP(PatchTransformer(CFG["dim"], CFG["layers"]))
    optimizer = FusedSGD(model.parameters(), lr=CFG["lr"], momentum=CFG["momentum"])

    train, test = make_data(CFG["n"], 1), make_data(128, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=CFG["batch"], sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, batch_size=64, sampler=DistributedSampler(test, shuffle=False))

    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            seen += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(seen)
        acc = accuracy(model, test_loader)
        if rank == 0:
            log.info("epoch %d loss %.4f accuracy %.3f", epoch, (seen[0] / seen[1]).item(), acc)
    optimizer.close()


def main():
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING, format="%(name)s %(message)s")
    try:
        run()
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
