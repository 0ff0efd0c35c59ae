"""The last rank only evaluates: trainers run DDP in a group of their own and hand it a snapshot after each epoch."""
import argparse
import json

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 5


def signals(n, seed):
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=gen)
    t = torch.linspace(0, 6.28, 40)
    phase = 6.28 * torch.rand(n, 1, generator=gen)
    x = torch.sin((y.unsqueeze(1) + 1) * t + phase) + 0.7 * torch.randn(n, 40, generator=gen)
    return TensorDataset(x.unsqueeze(1), y)


def build():
    return nn.Sequential(nn.Conv1d(1, 16, 7, padding=3), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2),
                         nn.Conv1d(16, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(), nn.Flatten(),
                         nn.Linear(320, CLASSES))


def train(args, rank, group, evaluator):
    replicas = dist.get_world_size(group)
    data = signals(args.samples, seed=1)
    sampler = DistributedSampler(data, num_replicas=replicas, rank=dist.get_rank(group), shuffle=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(build(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(x), len(x)])
        schedule.step()
        dist.all_reduce(sums, group=group)
        if rank == 0:
            print(f"epoch {epoch}: train loss {sums[0].item() / sums[1].item():.4f}", flush=True)
            for tensor in model.module.state_dict().values():
                dist.send(tensor.contiguous(), dst=evaluator)


@torch.no_grad()
def evaluate(args):
    model = build().eval()
    loader = DataLoader(signals(1000, seed=2), batch_size=250)
    best, history = -1.0, []
    for epoch in range(args.epochs):
        for tensor in model.state_dict().values():  # shares storage with the model
            dist.recv(tensor, src=0)
        hits = sum((model(x).argmax(-1) == y).sum().item() for x, y in loader)
        accuracy = hits / len(loader.dataset)
        history.append(accuracy)
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), "best.pt")  # the evaluator is the only writer
        print(f"  [evaluator] epoch {epoch}: accuracy {accuracy:.3f} best {best:.3f}", flush=True)
    with open("history.json", "w") as f:
        json.dump(history, f)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=960)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world >= 3
    evaluator = world - 1
    trainers = dist.new_group(list(range(world - 1)))  # called by all, the evaluator too
    if rank == evaluator:
        evaluate(args)
    else:
        train(args, rank, trainers, evaluator)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
