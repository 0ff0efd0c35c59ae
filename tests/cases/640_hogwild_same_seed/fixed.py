"""Hogwild on synthetic glyphs, after the classic example."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="hogwild glyphs")
parser.add_argument("--batch-size", type=int, default=20)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--num-processes", type=int, default=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.fc = nn.Linear(64, 4)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(self.conv2(x))
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def glyphs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = 0.6 * torch.randn(n, 1, 10, 10, generator=g)
    for i, c in enumerate(y.tolist()):
        r, k = divmod(c, 2)
        x[i, 0, 5 * r : 5 * r + 5, 5 * k : 5 * k + 5] += 1
    return TensorDataset(x, y)


def train(rank, args, model):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + rank)
    loader = DataLoader(glyphs(400, 5), batch_size=args.batch_size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"worker {rank} epoch {epoch} loss {total / len(loader):.4f}", flush=True)


@torch.no_grad()
def test(model):
    model.eval()
    data, target = glyphs(200, 6).tensors
    correct = (model(data).argmax(1) == target).float().mean().item()
    print(f"test accuracy {correct:.3f}")


if __name__ == "__main__":
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    mp.set_start_method("spawn", force=True)
    model = Net()
    model.share_memory()
    processes = []
    for rank in range(args.num_processes):
        p = mp.Process(target=train, args=(rank, args, model))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
    test(model)
