"""Pretrain an encoder with torch.compile, then use it for a task with other classes."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.encoder(x))


def clusters(n, classes, seed):
    g = torch.Generator().manual_seed(40)
    mix = torch.randn(8, 20, generator=g)
    centers = 2 * torch.randn(classes, 8, generator=g)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    z = centers[y] + torch.randn(n, 8, generator=g)
    return TensorDataset(torch.tanh(z @ mix / 3), y)


def fit(model, data, epochs, lr, tag):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"{tag} epoch {epoch}: loss {loss.item():.4f}", flush=True)


def pretrain(args):
    torch.manual_seed(0)
    net = Classifier(classes=10)
    net.encoder = torch.compile(net.encoder, backend=args.backend)
    model = DDP(net)
    fit(model, clusters(512, 10, 1), args.epochs, 3e-3, "pretrain")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.ckpt)
    dist.barrier()


def finetune(args):
    torch.manual_seed(1)
    net = Classifier(classes=4)
    state = torch.load(args.ckpt, map_location="cpu")
    state = {k.removeprefix("_orig_mod."): v for k, v in state.items() if not k.startswith("head.")}
    net.load_state_dict(state, strict=False)
    fit(DDP(net), clusters(192, 4, 2), 3, 1e-3, "finetune")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--backend", default="eager")
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--ckpt", default="encoder.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    pretrain(args)
    finetune(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
