"""Fine-tune on a second corpus with a bigger label set."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Classifier(nn.Module):
    def __init__(self, classes, vocab=60, width=20):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.hidden = nn.Linear(width, width)
        self.label = nn.Linear(width, classes)

    def forward(self, words):
        return self.label(torch.tanh(self.hidden(self.embedding(words).mean(1))))


def corpus(classes, n=256, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    words = torch.randint(0, 60, (n, 10), generator=g)
    words[:, :5] = (60 // classes) * y.unsqueeze(1) + torch.randint(0, 60 // classes, (n, 5), generator=g)
    return TensorDataset(words, y)


def load_pretrained(net, path, rank):
    pretrained = torch.load(path, map_location="cpu")
    own = net.state_dict()
    fitting = {k: v for k, v in pretrained.items() if k in own and own[k].shape == v.shape}
    own.update(fitting)
    if rank == 0:
        print(f"{len(fitting)} of {len(own)} tensors from {path}")


def run(net, data, epochs, rank):
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for words, y in loader:
            loss = nn.functional.cross_entropy(model(words), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--weights", default="coarse.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    coarse = Classifier(classes=3)
    run(coarse, corpus(3), 3, rank)
    if rank == 0:
        torch.save(coarse.state_dict(), args.weights)
    dist.barrier()

    fine = Classifier(classes=6)
    load_pretrained(fine, args.weights, rank)
    run(fine, corpus(6, seed=1), 3, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
