"""Fine-tune a pretrained encoder on a task with other classes."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, n, classes, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, classes, (n,), generator=g)
        freq = 1.0 + self.label.float() * (8.0 / classes)
        phase = 6.283 * torch.rand(n, generator=g)
        t = torch.linspace(0, 6.283, 48)
        self.wave = torch.sin(freq[:, None] * t + phase[:, None]) + 0.3 * torch.randn(n, 48, generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.wave[i].unsqueeze(0), self.label[i]


class ConvNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 12, 7, padding=3), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(12, 24, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(),
        )
        self.fc = nn.Linear(96, classes)

    def forward(self, x):
        return self.fc(self.features(x))


def init_from(net, path, log):
    saved = {k.removeprefix("module."): t for k, t in torch.load(path, map_location="cpu").items()}
    own = net.state_dict()
    usable = {name: t for name, t in saved.items() if name in own and t.shape == own[name].shape}
    own.update(usable)
    net.load_state_dict(own)
    log(f"initialised from {path}")
    return net


def train(net, data, epochs, lr, tag, log):
    model = DDP(net)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    opt = optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        stat = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            stat += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(stat)
        log(f"{tag} epoch {epoch}: accuracy {(stat[0] / stat[1]).item():.3f}")
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pretrained", default="pretrained.pth")
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    def log(text):
        if rank == 0:
            print(text, flush=True)

    torch.manual_seed(3)
    source = train(ConvNet(4), Waves(320, 4, seed=10), 4, 5e-3, "pretrain", log)
    if rank == 0:
        torch.save(source.state_dict(), args.pretrained)
    dist.barrier()

    torch.manual_seed(4)
    net = init_from(ConvNet(6), args.pretrained, log)
    train(net, Waves(192, 6, seed=20), args.epochs, 1e-3, "finetune", log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
