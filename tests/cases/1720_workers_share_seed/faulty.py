"""Lock-free training of one shared network by a crew of processes."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits(n, seed):
    proto = (torch.rand(10, 64, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    flip = (torch.rand(n, 64, generator=g) < 0.2).float()
    return TensorDataset((proto[y] - flip).abs(), y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 50)
        self.fc2 = nn.Linear(50, 10)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.fc2(self.drop(F.relu(self.fc1(x))))


class Trainee(mp.get_context("fork").Process):
    def __init__(self, index, net, data, args):
        super().__init__()
        self.index, self.net, self.data, self.args = index, net, data, args

    def run(self):
        torch.set_num_threads(1)
        torch.manual_seed(self.args.seed)
        loader = DataLoader(self.data, batch_size=self.args.batch_size, shuffle=True)
        opt = torch.optim.SGD(self.net.parameters(), lr=self.args.lr, momentum=0.5)
        for epoch in range(self.args.epochs):
            self.net.train()
            for x, y in loader:
                opt.zero_grad()
                loss = F.cross_entropy(self.net(x), y)
                loss.backward()
                opt.step()
            print(f"[{self.index}] epoch {epoch} loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def test(net):
    net.eval()
    data = digits(1000, 2)
    return (net(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--processes", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=20)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    net = Net()
    net.share_memory()
    data = digits(1000, 1)
    crew = [Trainee(k, net, data, args) for k in range(args.processes)]
    for trainee in crew:
        trainee.start()
    for trainee in crew:
        trainee.join()
    print(f"accuracy {test(net):.3f}")


if __name__ == "__main__":
    main()
