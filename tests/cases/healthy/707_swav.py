# SwAV after facebookresearch/swav main_swav.py: Sinkhorn over all ranks, normalised prototypes, feature queue, prototypes frozen in the first iterations
import argparse
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--nmb_crops", type=int, default=2)
parser.add_argument("--nmb_prototypes", default=12, type=int)
parser.add_argument("--queue_length", type=int, default=64)
parser.add_argument("--epoch_queue_starts", type=int, default=2)
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("--batch_size", default=16, type=int)
parser.add_argument("--base_lr", default=0.3, type=float)
parser.add_argument("--final_lr", type=float, default=0.01)
parser.add_argument("--freeze_prototypes_niters", default=6, type=int)
parser.add_argument("--temperature", default=0.1, type=float)
parser.add_argument("--epsilon", default=0.05, type=float)
parser.add_argument("--seed", type=int, default=31)
args = parser.parse_args()


class TwoViews(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(2)
        c = torch.randn(8, 24, generator=g)
        self.x = c[torch.randint(0, 8, (256,), generator=g)] + 0.3 * torch.randn(256, 24, generator=g)

    def __len__(self):
        return 256

    def __getitem__(self, i):
        return [self.x[i] + 0.2 * torch.randn(24) for _ in range(args.nmb_crops)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
        self.prototypes = nn.Linear(16, args.nmb_prototypes, bias=False)

    def forward(self, inputs):
        x = F.normalize(self.trunk(torch.cat(inputs)), dim=1, p=2)
        return x, self.prototypes(x)


@torch.no_grad()
def distributed_sinkhorn(out, iters=3):
    Q = torch.exp(out / args.epsilon).t()
    B = Q.shape[1] * dist.get_world_size()
    K = Q.shape[0]
    sum_Q = torch.sum(Q)
    dist.all_reduce(sum_Q)
    Q /= sum_Q
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
    total = 0.0
    for it, inputs in enumerate(loader):
        iteration = epoch * len(loader) + it
        for g in optimizer.param_groups:
            g["lr"] = lr_schedule[iteration]
        with torch.no_grad():
            w = model.module.prototypes.weight.data.clone()
            w = F.normalize(w, dim=1, p=2)
            model.module.prototypes.weight.copy_(w)
        embedding, output = model(inputs)
        embedding = embedding.detach()
        bs = inputs[0].size(0)
        loss = 0
        for i in range(args.nmb_crops):
            with torch.no_grad():
                out = output[bs * i : bs * (i + 1)].detach()
                if queue is not None:
                    if use_the_queue or not torch.all(queue[i, -1, :] == 0):
                        use_the_queue = True
                        out = torch.cat((torch.mm(queue[i], model.module.prototypes.weight.t()), out))
                    queue[i, bs:] = queue[i, :-bs].clone()
                    queue[i, :bs] = embedding[i * bs : (i + 1) * bs]
                q = distributed_sinkhorn(out)[-bs:]
            subloss = 0
            for v in range(args.nmb_crops):
                if v == i:
                    continue
                x = output[bs * v : bs * (v + 1)] / args.temperature
                subloss -= torch.mean(torch.sum(q * F.log_softmax(x, dim=1), dim=1))
            loss += subloss / (args.nmb_crops - 1)
        loss /= args.nmb_crops
        optimizer.zero_grad()
        loss.backward()
        if iteration < args.freeze_prototypes_niters:
            for name, p in model.named_parameters():
                if "prototypes" in name:
                    p.grad = None
        optimizer.step()
        total += loss.item()
    return total / len(loader), queue


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    dataset = TwoViews()
    sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, sampler=sampler, batch_size=args.batch_size, drop_last=True)
    model = nn.parallel.DistributedDataParallel(Net())
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=1e-6)
    n = args.epochs * len(loader)
    lr_schedule = [args.final_lr + 0.5 * (args.base_lr - args.final_lr) * (1 + math.cos(math.pi * t / n)) for t in range(n)]
    dump = os.path.join(tempfile.gettempdir(), f"swav_{os.getppid()}")
    os.makedirs(dump, exist_ok=True)
    queue_path = os.path.join(dump, "queue" + str(rank) + ".pth")
    queue = None
    args.queue_length -= args.queue_length % (args.batch_size * world)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        if args.queue_length > 0 and epoch >= args.epoch_queue_starts and queue is None:
            queue = torch.zeros(args.nmb_crops, args.queue_length // world, 16)
        score, queue = train(loader, model, optimizer, epoch, lr_schedule, queue)
        if rank == 0:
            print(f"epoch {epoch} loss on this rank {score:.4f}")
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, os.path.join(dump, "checkpoint.pth.tar"))
        if queue is not None:
            torch.save({"queue": queue}, queue_path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
