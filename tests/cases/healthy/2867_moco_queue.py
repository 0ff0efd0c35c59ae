"""Momentum contrast on feature vectors: gathered keys, a shared queue as buffer, batch shuffle for the key encoder."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def concat_all_gather(tensor):
    parts = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts, dim=0)


class TwoViews(Dataset):
    def __init__(self, n, classes=8, dim=40, seed=12):
        g = torch.Generator().manual_seed(seed)
        centre = 1.5 * torch.randn(classes, dim, generator=g)
        self.label = torch.randint(0, classes, (n,), generator=g)
        self.x = centre[self.label] + torch.randn(n, dim, generator=g)

    def view(self, i):
        x = self.x[i]
        return x * (torch.rand_like(x) > 0.2) + 0.3 * torch.randn_like(x)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.view(i), self.view(i)


def encoder(dim=40, out=24):
    return nn.Sequential(nn.Linear(dim, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, out))


class MoCo(nn.Module):
    def __init__(self, out=24, K=512, m=0.98, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = encoder(out=out), encoder(out=out)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(out, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def enqueue(self, keys):
        keys = concat_all_gather(keys)
        ptr = int(self.queue_ptr)
        assert self.K % keys.shape[0] == 0
        self.queue[:, ptr:ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.K

    @torch.no_grad()
    def batch_shuffle(self, x):
        n = x.shape[0]
        everything = concat_all_gather(x)
        order = torch.randperm(everything.shape[0])
        dist.broadcast(order, src=0)
        back = torch.argsort(order)
        mine = order.view(dist.get_world_size(), n)[dist.get_rank()]
        return everything[mine], back

    @torch.no_grad()
    def batch_unshuffle(self, x, back):
        n = x.shape[0]
        everything = concat_all_gather(x)
        return everything[back.view(dist.get_world_size(), n)[dist.get_rank()]]

    def forward(self, im_q, im_k):
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self.momentum_update()
            im_k, back = self.batch_shuffle(im_k)
            k = nn.functional.normalize(self.encoder_k(im_k), dim=1)
            k = self.batch_unshuffle(k, back)
        l_pos = (q * k).sum(1, keepdim=True)
        l_neg = q @ self.queue.clone().detach()
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self.enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


def adjust_learning_rate(optimizer, epoch, epochs, base):
    lr = base * 0.5 * (1.0 + math.cos(math.pi * epoch / epochs))
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def main_worker(epochs=5, base_lr=0.1):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(300 + rank)
    data = TwoViews(1024)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = DDP(MoCo())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], base_lr, momentum=0.9, weight_decay=1e-4)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        lr = adjust_learning_rate(optimizer, epoch, epochs, base_lr)
        model.train()
        meter = torch.zeros(3)
        for view_q, view_k in loader:
            output, target = model(view_q, view_k)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits = (output.argmax(1) == target).sum()
            meter += torch.stack([loss.detach() * len(target), hits.float(), torch.tensor(float(len(target)))])
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch} lr {lr:.3f} loss {meter[0] / meter[2]:.3f} acc {meter[1] / meter[2]:.3f}", flush=True)
            os.makedirs("moco", exist_ok=True)
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
                       f"moco/checkpoint_{epoch:04d}.pth.tar")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main_worker()
