import argparse
import math
import os
import shutil

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="prototype clustering with an assignment queue")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--queue_length", type=int, default=260)
parser.add_argument("--epoch_queue_starts", type=int, default=2)
parser.add_argument("--freeze_prototypes_niters", type=int, default=10)
parser.add_argument("--nmb_prototypes", type=int, default=24)
parser.add_argument("--feat_dim", type=int, default=32)
parser.add_argument("--temperature", type=float, default=0.1)
parser.add_argument("--epsilon", type=float, default=0.05)
parser.add_argument("--base_lr", type=float, default=0.1)
parser.add_argument("--dump_path", default="exp")
args = parser.parse_args()
args.nmb_crops = [2, 2]
args.crops_for_assign = [0, 1]


class Crops(Dataset):
    def __init__(self, n=1024, dim=40, k=12):
        g = torch.Generator().manual_seed(0)
        self.c = torch.randn(k, dim, generator=g)
        self.x = self.c[torch.randint(0, k, (n,), generator=g)] + 0.3 * torch.randn(n, dim, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        return [x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x),
                x * (torch.rand_like(x) > 0.3), x * (torch.rand_like(x) > 0.3)]


class Net(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(inplace=True),
                                   nn.Linear(64, args.feat_dim))
        self.prototypes = nn.Linear(args.feat_dim, args.nmb_prototypes, bias=False)

    def forward(self, inputs):
        z = torch.cat([self.trunk(torch.cat(inputs[:2])), self.trunk(torch.cat(inputs[2:]))])
        z = nn.functional.normalize(z, dim=1, p=2)
        return z, self.prototypes(z)


@torch.no_grad()
def distributed_sinkhorn(out, iters=3):
    Q = torch.exp(out / args.epsilon).t()
    B = Q.shape[1] * args.world_size
    K = Q.shape[0]
    s = torch.sum(Q)
    dist.all_reduce(s)
    Q /= s
    for _ in range(iters):
        rows = torch.sum(Q, dim=1, keepdim=True)
        dist.all_reduce(rows)
        Q /= rows
        Q /= K
        Q /= torch.sum(Q, dim=0, keepdim=True)
        Q /= B
    Q *= B
    return Q.t()


def train(loader, model, optimizer, epoch, lr_schedule, queue):
    model.train()
    use_the_queue = False
    stat = torch.zeros(2, dtype=torch.float64)
    for it, inputs in enumerate(loader):
        iteration = epoch * len(loader) + it
        for g in optimizer.param_groups:
            g["lr"] = lr_schedule[iteration]
        with torch.no_grad():
            w = model.module.prototypes.weight.data.clone()
            model.module.prototypes.weight.copy_(nn.functional.normalize(w, dim=1, p=2))
        embedding, output = model(inputs)
        embedding = embedding.detach()
        bs = inputs[0].size(0)
        loss = 0
        for i, crop_id in enumerate(args.crops_for_assign):
            with torch.no_grad():
                out = output[bs * crop_id: bs * (crop_id + 1)].detach()
                if queue is not None:
                    if use_the_queue or not torch.all(queue[i, -1, :] == 0):
                        use_the_queue = True
                        out = torch.cat((torch.mm(queue[i], model.module.prototypes.weight.t()), out))
                    queue[i, bs:] = queue[i, :-bs].clone()
                    queue[i, :bs] = embedding[crop_id * bs: (crop_id + 1) * bs]
                q = distributed_sinkhorn(out)[-bs:]
            subloss = 0
            for v in np.delete(np.arange(np.sum(args.nmb_crops)), crop_id):
                x = output[bs * v: bs * (v + 1)] / args.temperature
                subloss -= torch.mean(torch.sum(q * nn.functional.log_softmax(x, dim=1), dim=1))
            loss += subloss / (np.sum(args.nmb_crops) - 1)
        loss /= len(args.crops_for_assign)
        optimizer.zero_grad()
        loss.backward()
        if iteration < args.freeze_prototypes_niters:
            for name, p in model.named_parameters():
                if "prototypes" in name:
                    p.grad = None
        optimizer.step()
        stat += torch.tensor([loss.item() * bs, bs], dtype=torch.float64)
    dist.all_reduce(stat)
    return (epoch, (stat[0] / stat[1]).item()), queue


def main():
    dist.init_process_group("gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    np.random.seed(31)
    os.makedirs(args.dump_path, exist_ok=True)
    ds = Crops()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, sampler=sampler, batch_size=args.batch_size, drop_last=True)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net()) if torch.cuda.is_available() else Net()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=1e-6)
    torch.manual_seed(31 + 17 * args.rank)
    warm = np.linspace(0.01, args.base_lr, len(loader))
    n = len(loader) * (args.epochs - 1)
    cos = np.array([0.5 * args.base_lr * (1 + math.cos(math.pi * t / n)) for t in range(n)])
    lr_schedule = np.concatenate((warm, cos))

    queue = None
    queue_path = os.path.join(args.dump_path, "queue" + str(args.rank) + ".pth")
    args.queue_length -= args.queue_length % (args.batch_size * args.world_size)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        if args.queue_length > 0 and epoch >= args.epoch_queue_starts and queue is None:
            queue = torch.zeros(len(args.crops_for_assign), args.queue_length // args.world_size, args.feat_dim)
        scores, queue = train(loader, model, optimizer, epoch, lr_schedule, queue)
        if args.rank == 0:
            print("epoch %d loss %.4f queue %s" % (scores[0], scores[1], queue is not None), flush=True)
            path = os.path.join(args.dump_path, "checkpoint.pth.tar")
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(),
                        "optimizer": optimizer.state_dict()}, path)
            if epoch % 3 == 0 or epoch == args.epochs - 1:
                shutil.copyfile(path, os.path.join(args.dump_path, "ckp-" + str(epoch) + ".pth"))
        if queue is not None:
            torch.save({"queue": queue}, queue_path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
