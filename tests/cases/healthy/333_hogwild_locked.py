# nproc: 1 (starts two training processes on one shared model)
"""mnist_hogwild after pytorch/examples, on vectors; the update itself is taken under a lock."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

parser = argparse.ArgumentParser(description="Hogwild example")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--num-processes", type=int, default=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        x = F.dropout(F.relu(self.fc1(x)), 0.1, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return torch.utils.data.TensorDataset(x, x.view(n, 4, 4).sum(2).argmax(1))


def train(rank, args, model, lock):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + rank)  # own shuffling, own dropout
    loader = torch.utils.data.DataLoader(data(256, 0), batch_size=args.batch_size, shuffle=True)
    optimizer = optim.SGD(model.parameters(), lr=args.lr)  # no momentum: no state to share
    model.train()
    for epoch in range(1, args.epochs + 1):
        for x, y in loader:
            optimizer.zero_grad()  # gradients belong to this process
            F.nll_loss(model(x), y).backward()
            with lock:
                optimizer.step()


def test(model):
    model.eval()
    loss = correct = n = 0
    with torch.no_grad():
        for x, y in torch.utils.data.DataLoader(data(100, 9), batch_size=50):
            out = model(x)
            loss += F.nll_loss(out, y, reduction="sum").item()
            correct += (out.argmax(1) == y).sum().item()
            n += len(y)
    print(f"Test set: Average loss: {loss / n:.4f}, Accuracy: {correct}/{n}")


if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    mp.set_start_method("spawn")
    model = Net()
    model.share_memory()
    lock = mp.Lock()
    test(model)
    processes = []
    for rank in range(args.num_processes):
        p = mp.Process(target=train, args=(rank, args, model, lock))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
        assert p.exitcode == 0
    test(model)
