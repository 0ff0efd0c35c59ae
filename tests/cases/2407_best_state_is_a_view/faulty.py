import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CFG = dict(vocab=60, length=20, train=192, val=256, test=512, epochs=12, batch=16, lr=6e-3, patience=8)


def make_split(n, seed):
    """Token bags: class 1 when 'positive' tokens outnumber 'negative' ones; one label in six is wrong."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, CFG["vocab"], (n, CFG["length"]), generator=g)
    score = (tokens < 20).sum(1) - ((tokens >= 20) & (tokens < 40)).sum(1)
    label = (score > 0).long()
    flip = torch.rand(n, generator=g) < 1 / 6
    return TensorDataset(tokens, torch.where(flip, 1 - label, label))


class Reader(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(CFG["vocab"], dim)
        self.rnn = nn.GRU(dim, 48, batch_first=True)
        self.head = nn.Linear(48, 2)

    def forward(self, tokens):
        h, _ = self.rnn(self.emb(tokens))
        return self.head(h.mean(1))


class EarlyStopping:
    """Keeps the weights of the best validation epoch and says when to give up."""

    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.best_epoch = -1
        self.best_state = None

    def update(self, epoch, value, model):
        if value < self.best:
            self.best, self.best_epoch = value, epoch
            self.best_state = model.state_dict()
        return epoch - self.best_epoch >= self.patience


def loader_for(ds, train):
    sampler = DistributedSampler(ds, shuffle=train, seed=31)
    return DataLoader(ds, batch_size=CFG["batch"] if train else 64, sampler=sampler), sampler


@torch.no_grad()
def score(net, loader):
    net.eval()
    acc = torch.zeros(3, dtype=torch.float64)
    for tokens, label in loader:
        logits = net(tokens)
        acc[0] += F.cross_entropy(logits, label, reduction="sum").double()
        acc[1] += (logits.argmax(1) == label).sum()
        acc[2] += len(label)
    dist.all_reduce(acc)
    net.train()
    return (acc[0] / acc[2]).item(), (acc[1] / acc[2]).item()


def train(net):
    ddp = DDP(net)
    opt = torch.optim.Adam(ddp.parameters(), lr=CFG["lr"])
    train_loader, sampler = loader_for(make_split(CFG["train"], 1), train=True)
    val_loader, _ = loader_for(make_split(CFG["val"], 2), train=False)
    stopper = EarlyStopping(CFG["patience"])
    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        agg = torch.zeros(2, dtype=torch.float64)
        for tokens, label in train_loader:
            loss = F.cross_entropy(ddp(tokens), label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            agg += torch.tensor([loss.item() * len(label), len(label)], dtype=torch.float64)
        dist.all_reduce(agg)
        val_loss, val_acc = score(net, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: train {agg[0] / agg[1]:.3f} val {val_loss:.3f} acc {val_acc:.3f}")
        if stopper.update(epoch, val_loss, net):
            break
    return stopper


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(12)
    net = Reader()
    stopper = train(net)

    net.load_state_dict(stopper.best_state)
    test_loader, _ = loader_for(make_split(CFG["test"], 3), train=False)
    test_loss, test_acc = score(net, test_loader)
    if rank == 0:
        print(f"best epoch {stopper.best_epoch} (val {stopper.best:.3f}): test {test_loss:.3f} acc {test_acc:.3f}")
        os.makedirs("ckpt", exist_ok=True)
        torch.save({"model": net.state_dict(), "epoch": stopper.best_epoch, "val": stopper.best}, "ckpt/best.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
