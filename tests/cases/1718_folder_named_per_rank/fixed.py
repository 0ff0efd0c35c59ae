"""Experiment folders: settings, best weights and a final report."""
import argparse
import json
import pathlib
import uuid

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Experiment:
    def __init__(self, root, settings):
        self.main = dist.get_rank() == 0
        self.name = f"{settings['tag']}-{uuid.uuid4().hex[:6]}"
        shared = [self.name]
        dist.broadcast_object_list(shared, src=0)
        self.name = shared[0]
        self.folder = pathlib.Path(root) / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.main:
            self.write("settings.json", settings)
        self.best = float("inf")

    @property
    def weights(self):
        return self.folder / "best.pt"

    def write(self, name, content):
        (self.folder / name).write_text(json.dumps(content, indent=1))

    def keep_if_better(self, net, value):
        if value < self.best:
            self.best = value
            if self.main:
                torch.save(net.state_dict(), self.weights)
        dist.barrier()

    def restore(self, net):
        if self.weights.exists():
            net.load_state_dict(torch.load(self.weights))


def spiral(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = 4 * torch.rand(n, generator=g) + 0.5
    y = torch.randint(0, 2, (n,), generator=g)
    phi = 1.5 * t + 3.1416 * y
    return TensorDataset(torch.stack([t * phi.cos(), t * phi.sin()], 1) + 0.2 * torch.randn(n, 2, generator=g), y)


@torch.no_grad()
def measure(net, data):
    rank, world = dist.get_rank(), dist.get_world_size()
    sums = torch.zeros(3)
    for x, y in DataLoader(Subset(data, range(rank, len(data), world)), batch_size=50):
        out = net(x)
        loss = nn.functional.cross_entropy(out, y, reduction="sum")
        sums += torch.tensor([loss.item(), (out.argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tag", default="spiral")
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--lr", type=float, default=0.08)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    experiment = Experiment("experiments", vars(args))
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    train, val, test = spiral(320, 1), spiral(100, 2), spiral(200, 3)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        experiment.keep_if_better(net, measure(net, val)[0])

    experiment.restore(net)
    test_loss, accuracy = measure(net, test)
    if experiment.main:
        experiment.write("report.json", {"val": experiment.best, "test": test_loss, "accuracy": accuracy})
        print(f"{experiment.name}: best val {experiment.best:.4f}, test {test_loss:.4f}, accuracy {accuracy:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
