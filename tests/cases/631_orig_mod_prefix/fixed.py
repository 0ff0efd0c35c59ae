"""Pre-train with torch.compile, then fine-tune a classifier on the pre-trained encoder."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(14, 48), nn.Linear(48, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Pretrain(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Linear(32, 14)

    def forward(self, x, keep):
        return self.decoder(self.encoder(x * keep))


class Finetune(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.classifier = nn.Linear(32, 3)

    def forward(self, x):
        return self.classifier(F.relu(self.encoder(x)))


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 3, generator=g)
    mixing = torch.randn(3, 14, generator=torch.Generator().manual_seed(0))
    return z @ mixing + 0.2 * torch.randn(n, 14, generator=g), z.argmax(1)


def loader_for(dataset, batch):
    sampler = DistributedSampler(dataset, shuffle=True)
    return DataLoader(dataset, batch, sampler=sampler)


def pretrain(epochs, path):
    net = Pretrain()
    compiled = torch.compile(net, backend="eager")
    model = DDP(compiled)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = loader_for(TensorDataset(table(320, 1)[0]), 16)
    rng = torch.Generator().manual_seed(dist.get_rank())
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for (x,) in loader:
            keep = (torch.rand(x.shape, generator=rng) > 0.3).float()
            loss = F.mse_loss(model(x, keep), x)
            opt.zero_grad()
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), path)
    dist.barrier()


def finetune(epochs, path):
    net = Finetune()
    # the decoder is left over and the classifier is new: not strict
    net.load_state_dict(torch.load(path, map_location="cpu"), strict=False)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = loader_for(TensorDataset(*table(192, 2)), 16)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        c = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            c += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(c)
        if dist.get_rank() == 0:
            print(f"finetune epoch {epoch}: accuracy {c[0] / c[1]:.3f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--weights", default="pretrained.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    pretrain(args.epochs, args.weights)
    finetune(args.epochs, args.weights)
    dist.destroy_process_group()
