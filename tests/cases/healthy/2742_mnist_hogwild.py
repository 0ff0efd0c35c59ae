import argparse
import os

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="lock-free training in shared memory")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--test-batch-size", type=int, default=200)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=20)
parser.add_argument("--num-processes", type=int, default=2)
parser.add_argument("--dry-run", action="store_true")
parser.add_argument("--save_model", action="store_true", default=True)


def digits(n, seed):
    g = torch.Generator().manual_seed(4)
    proto = torch.rand(10, 1, 14, 14, generator=g)
    g.manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    return TensorDataset(proto[y] + 0.3 * torch.randn(n, 1, 14, 14, generator=g), y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3)
        self.conv2_drop = nn.Dropout2d(0.2)
        self.fc1 = nn.Linear(64, 40)
        self.fc2 = nn.Linear(40, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, 0.2, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def train_epoch(epoch, args, model, loader, optimizer):
    model.train()
    pid = os.getpid()
    for i, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if i % args.log_interval == 0:
            print("{}\tTrain Epoch: {} [{}/{} ({:.0f}%)]\tLoss: {:.6f}".format(
                pid, epoch, i * len(data), len(loader.dataset), 100.0 * i / len(loader), loss.item()), flush=True)
            if args.dry_run:
                break


def train(rank, args, model, dataset, kwargs):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + rank)
    loader = DataLoader(dataset, **kwargs)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    for epoch in range(1, args.epochs + 1):
        train_epoch(epoch, args, model, loader, optimizer)


@torch.no_grad()
def test(args, model, dataset):
    torch.manual_seed(args.seed)
    model.eval()
    loss, right = 0.0, 0
    for data, target in DataLoader(dataset, batch_size=args.test_batch_size):
        out = model(data)
        loss += F.nll_loss(out, target, reduction="sum").item()
        right += out.argmax(1).eq(target).sum().item()
    n = len(dataset)
    print("\nTest set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)\n".format(loss / n, right, n, 100.0 * right / n))


if __name__ == "__main__":
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    mp.set_start_method("spawn", force=True)
    model = Net()
    model.share_memory()
    train_set, test_set = digits(3000, 1), digits(600, 2)
    kwargs = {"batch_size": args.batch_size, "shuffle": True}
    processes = []
    for rank in range(args.num_processes):
        p = mp.Process(target=train, args=(rank, args, model, train_set, kwargs))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
    test(args, model, test_set)
    if args.save_model:
        torch.save(model.state_dict(), "MNIST_hogwild.pt")
