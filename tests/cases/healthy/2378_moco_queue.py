import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def concat_all_gather(tensor):
    """all_gather carries no gradient, none is needed here."""
    gathered = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous(), async_op=False)
    return torch.cat(gathered, dim=0)


def make_encoder(dim):
    return nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 64),
                         nn.ReLU(inplace=True), nn.Linear(64, dim))


class MoCo(nn.Module):
    def __init__(self, dim=16, K=512, m=0.98, T=0.1):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = make_encoder(dim)
        self.encoder_k = make_encoder(dim)
        for pq, pk in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            pk.data.copy_(pq.data)
            pk.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for pq, pk in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            pk.data = pk.data * self.m + pq.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = concat_all_gather(keys)
        n, ptr = keys.shape[0], int(self.queue_ptr)
        assert self.K % n == 0
        self.queue[:, ptr:ptr + n] = keys.T
        self.queue_ptr[0] = (ptr + n) % self.K

    @torch.no_grad()
    def _batch_shuffle_ddp(self, x):
        local = x.shape[0]
        everything = concat_all_gather(x)
        idx_shuffle = torch.randperm(everything.shape[0])
        dist.broadcast(idx_shuffle, src=0)
        idx_unshuffle = torch.argsort(idx_shuffle)
        mine = idx_shuffle.view(everything.shape[0] // local, -1)[dist.get_rank()]
        return everything[mine], idx_unshuffle

    @torch.no_grad()
    def _batch_unshuffle_ddp(self, x, idx_unshuffle):
        local = x.shape[0]
        everything = concat_all_gather(x)
        mine = idx_unshuffle.view(everything.shape[0] // local, -1)[dist.get_rank()]
        return everything[mine]

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            im_k, idx_unshuffle = self._batch_shuffle_ddp(im_k)
            k = F.normalize(self.encoder_k(im_k), dim=1)
            k = self._batch_unshuffle_ddp(k, idx_unshuffle)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


class TwoViews(Dataset):
    """Instances in a low-dimensional subspace; a view masks and perturbs the outer features."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        basis = torch.randn(6, 40, generator=torch.Generator().manual_seed(17))
        self.z = torch.randn(n, 6, generator=g)
        self.x = self.z @ basis / math.sqrt(6)

    def __len__(self):
        return len(self.x)

    def view(self, x):
        return x * (torch.rand_like(x) > 0.2) + 0.3 * torch.randn_like(x)

    def __getitem__(self, i):
        return [self.view(self.x[i]), self.view(self.x[i])], i


class Meter:
    def __init__(self):
        self.v = torch.zeros(3, dtype=torch.float64)

    def update(self, loss, acc1, n):
        self.v += torch.tensor([loss * n, acc1 * n, n], dtype=torch.float64)

    def reduced(self):
        t = self.v.clone()
        dist.all_reduce(t)
        return (t[0] / t[2]).item(), (t[1] / t[2]).item()


def adjust_learning_rate(optimizer, epoch, args):
    lr = args.lr * 0.5 * (1.0 + math.cos(math.pi * epoch / args.epochs))
    for group in optimizer.param_groups:
        group["lr"] = lr


def train(loader, model, criterion, optimizer):
    meter = Meter()
    model.train()
    for images, _ in loader:
        output, target = model(im_q=images[0], im_k=images[1])
        loss = criterion(output, target)
        acc1 = (output.argmax(1) == target).float().mean().item()
        meter.update(loss.item(), acc1, images[0].size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return meter.reduced()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=6, type=int)
    parser.add_argument("--batch-size", default=64, type=int, help="over all processes")
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--moco-k", default=512, type=int)
    parser.add_argument("--moco-m", default=0.98, type=float)
    parser.add_argument("--moco-t", default=0.1, type=float)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2024 + args.rank)

    model = DistributedDataParallel(MoCo(16, args.moco_k, args.moco_m, args.moco_t))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    dataset = TwoViews(2048, 5)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size // args.world_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        adjust_learning_rate(optimizer, epoch, args)
        loss, acc1 = train(loader, model, criterion, optimizer)
        if args.rank == 0:
            print(f"Epoch: [{epoch}]\tLoss {loss:.4f}\tAcc@1 {100 * acc1:.2f}")
            os.makedirs("moco_ckpt", exist_ok=True)
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
                       f"moco_ckpt/checkpoint_{epoch:04d}.pth.tar")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
