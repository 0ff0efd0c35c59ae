"""MNIST-hogwild style script on generated pictures."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def bars(n, seed):
    """8x8 pictures of one horizontal or vertical bar."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 16, (n,), generator=g)
    x = 0.4 * torch.randn(n, 1, 8, 8, generator=g)
    for i, k in enumerate(y.tolist()):
        if k < 8:
            x[i, 0, k] += 1
        else:
            x[i, 0, :, k - 8] += 1
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 64, 16)

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).flatten(1))


def train(rank, model, dataset, epochs, lr):
    torch.set_num_threads(1)
    torch.manual_seed(1 + rank)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()


@torch.no_grad()
def test(model, dataset):
    x, y = dataset.tensors
    return (model(x).argmax(1) == y).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--processes", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    torch.manual_seed(1)
    ctx = mp.get_context("fork")
    model = Net()
    model.share_memory()
    train_set, test_set = bars(640, 1), bars(320, 2)
    processes = []
    for rank in range(args.processes):
        p = ctx.Process(target=train, args=(rank, model, train_set, args.epochs, args.lr))
        p.start()
        processes.append(p)
    print(f"test accuracy {test(model, test_set):.3f}")
    torch.save(model.state_dict(), "bars.pt")
    for p in processes:
        p.join()


if __name__ == "__main__":
    main()
