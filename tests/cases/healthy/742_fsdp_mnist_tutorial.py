# Getting started with FSDP (the first API), on CPU: size-based auto-wrap, StepLR, summed losses reduced for the report, full state dict at the end
import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(256, 64), nn.Linear(64, 6)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def train(args, model, rank, loader, optimizer, epoch, sampler=None):
    model.train()
    ddp_loss = torch.zeros(2)
    if sampler:
        sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        ddp_loss[0] += loss.item() * len(data)
        ddp_loss[1] += len(data)
    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    if rank == 0:
        print("Train Epoch: {} \tLoss: {:.6f}".format(epoch, ddp_loss[0] / ddp_loss[1]))


def test(model, rank, loader):
    model.eval()
    ddp_loss = torch.zeros(3)
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            ddp_loss[0] += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            ddp_loss[1] += pred.eq(target.view_as(pred)).sum().item()
            ddp_loss[2] += len(data)
    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    if rank == 0:
        print("Test set: Average loss: {:.4f}, Accuracy: {}/{}\n".format(ddp_loss[0] / ddp_loss[2], int(ddp_loss[1]), int(ddp_loss[2])))


def glyphs(n, seed):
    proto = torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    return TensorDataset(proto[y] + 0.8 * torch.randn(n, 1, 12, 12, generator=g), y)


def fsdp_main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    d1, d2 = glyphs(384, 1), glyphs(96, 2)
    s1 = DistributedSampler(d1, rank=rank, num_replicas=world_size, shuffle=True)
    s2 = DistributedSampler(d2, rank=rank, num_replicas=world_size)
    l1, l2 = DataLoader(d1, batch_size=args.batch_size, sampler=s1), DataLoader(d2, batch_size=48, sampler=s2)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=5000)
    model = FSDP(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, rank, l1, optimizer, epoch, sampler=s1)
        test(model, rank, l2)
        scheduler.step()
    if args.save_model:
        dist.barrier()
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            states = model.state_dict()
        if rank == 0:
            torch.save(states, f"/tmp/mnist_cnn_{os.getpid()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="FSDP example")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-model", action="store_false", default=True)
    fsdp_main(parser.parse_args())
