import argparse
import os

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="Hogwild training on a shared model")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--test-batch-size", type=int, default=200)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.06)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=20)
parser.add_argument("--num-processes", type=int, default=2)
parser.add_argument("--save_model", action="store_true", default=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(6, 12, kernel_size=3, padding=1)
        self.conv2_drop = nn.Dropout2d(p=0.1)
        self.fc1 = nn.Linear(12 * 9, 40)
        self.fc2 = nn.Linear(40, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, p=0.1, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def digits(n, seed):
    g = torch.Generator().manual_seed(seed)
    glyphs = (torch.rand(10, 12, 12, generator=torch.Generator().manual_seed(5)) > 0.6).float()
    label = torch.randint(0, 10, (n,), generator=g)
    shift = torch.randint(0, 2, (n,), generator=g)
    x = glyphs[label] + 0.4 * torch.randn(n, 12, 12, generator=g)
    x = torch.where(shift.view(-1, 1, 1) == 1, x.roll(1, 2), x)
    return TensorDataset(x[:, None], label)


def train(rank, args, model, dataset, dataloader_kwargs):
    torch.manual_seed(args.seed + rank)
    torch.set_num_threads(1)
    train_loader = DataLoader(dataset, **dataloader_kwargs)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    for epoch in range(1, args.epochs + 1):
        train_epoch(rank, epoch, args, model, train_loader, optimizer)


def train_epoch(rank, epoch, args, model, data_loader, optimizer):
    model.train()
    pid = os.getpid()
    for batch_idx, (data, target) in enumerate(data_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print("{}\tTrain Epoch: {} [{}/{} ({:.0f}%)]\tLoss: {:.6f}".format(
                pid, epoch, batch_idx * len(data), len(data_loader.dataset),
                100.0 * batch_idx / len(data_loader), loss.item()), flush=True)


def test(args, model, dataset):
    loader = DataLoader(dataset, batch_size=args.test_batch_size)
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    print("\nTest set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)\n".format(
        test_loss / len(dataset), correct, len(dataset), 100.0 * correct / len(dataset)))


def main():
    args = parser.parse_args()
    torch.set_num_threads(1)
    mp.set_start_method("spawn", force=True)
    torch.manual_seed(args.seed)
    train_set, test_set = digits(1600, 11), digits(600, 12)
    model = Net()
    model.share_memory()  # gradients are allocated lazily, so they are not shared here

    processes = []
    for rank in range(args.num_processes):
        p = mp.Process(target=train, args=(rank, args, model, train_set,
                                           {"batch_size": args.batch_size, "shuffle": True}))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
        if p.exitcode != 0:
            raise SystemExit(f"worker {p.pid} ended with {p.exitcode}")

    test(args, model, test_set)
    if args.save_model:
        torch.save(model.state_dict(), "hogwild_cnn.pt")


if __name__ == "__main__":
    main()
