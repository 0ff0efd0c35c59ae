"""Transfer from a source task with ten classes to a target task with four."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(30, 80), nn.ReLU(), nn.Linear(80, 40), nn.ReLU())
        self.fc = nn.Linear(40, classes)

    def forward(self, x):
        return self.fc(self.features(x))


def clusters(classes, n, seed):
    centers = torch.randn(classes, 30, generator=torch.Generator().manual_seed(4))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    return TensorDataset(centers[y] + 1.5 * torch.randn(n, 30, generator=g), y)


def load_pretrained(model, path):
    pretrained = torch.load(path, map_location="cpu")
    current = model.state_dict()
    matching = {k: v for k, v in pretrained.items() if k in current and v.shape == current[k].shape}
    current.update(matching)
    if int(os.environ["RANK"]) == 0:
        print(f"using {len(matching)} of {len(pretrained)} pretrained tensors", flush=True)
    return model


def run(net, data, epochs, lr):
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        totals = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            totals += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(totals)
        if dist.get_rank() == 0:
            print(f"{net.fc.out_features} classes, epoch {epoch}: accuracy {(totals[0] / totals[1]).item():.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--weights", default="source.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    source = Net(10)
    run(source, clusters(10, 640, 1), epochs=4, lr=0.05)
    if dist.get_rank() == 0:
        torch.save(source.state_dict(), args.weights)
    dist.barrier()
    target = load_pretrained(Net(4), args.weights)
    run(target, clusters(4, 160, 2), epochs=4, lr=0.01)
    dist.destroy_process_group()


main()
