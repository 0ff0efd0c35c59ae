"""Text topic model with dropout; rank 0 alone validates on the undivided held-out set after every epoch."""
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LOG = logging.getLogger("topics")
VOCAB, TOPICS, LENGTH = 80, 5, 16


def documents(count, seed):
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(TOPICS, (count,), generator=g)
    own = torch.randint(0, VOCAB // TOPICS, (count, LENGTH), generator=g) + topic[:, None] * (VOCAB // TOPICS)
    other = torch.randint(0, VOCAB, (count, LENGTH), generator=g)
    take = torch.rand(count, LENGTH, generator=g) < 0.3
    return TensorDataset(torch.where(take, own, other), topic)


class BagOfEmbeddings(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.classify = nn.Sequential(nn.Dropout(0.3), nn.Linear(dim, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, TOPICS))

    def forward(self, tokens):
        return self.classify(self.bag(tokens))


@torch.no_grad()
def validate(net, dataset):
    net.eval()
    right = 0
    for tokens, topic in DataLoader(dataset, batch_size=64):
        right += (net(tokens).argmax(1) == topic).sum().item()
    return right / len(dataset)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="[%(name)s] %(message)s")
    torch.manual_seed(100 + rank)
    net = BagOfEmbeddings()
    ddp = DistributedDataParallel(net)
    opt = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    train, held_out = documents(384, 1), documents(130, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=24, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for tokens, topic in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(ddp(tokens), topic)
            loss.backward()
            opt.step()
        if rank == 0:
            LOG.info("epoch %d held-out accuracy %.3f", epoch, validate(net, held_out))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
