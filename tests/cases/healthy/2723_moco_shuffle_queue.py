import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=6, type=int)
parser.add_argument("--batch-size", default=64, type=int, help="total over all processes")
parser.add_argument("--moco-k", default=512, type=int)
parser.add_argument("--moco-m", default=0.98, type=float)
parser.add_argument("--moco-t", default=0.2, type=float)
parser.add_argument("--lr", default=0.06, type=float)


class TwoCrops(Dataset):
    def __init__(self, n=1536, classes=16, dim=24):
        g = torch.Generator().manual_seed(3)
        self.base = torch.randn(classes, dim, generator=g)
        self.y = torch.arange(n) % classes
        self.x = self.base[self.y] + 0.25 * torch.randn(n, dim, generator=g)

    def __len__(self):
        return len(self.x)

    def aug(self, x):
        return x * (torch.rand_like(x) > 0.15) + 0.1 * torch.randn_like(x)

    def __getitem__(self, i):
        return [self.aug(self.x[i]), self.aug(self.x[i])], 0


def encoder(dim=24, out=32):
    return nn.Sequential(nn.Linear(dim, 64), nn.BatchNorm1d(64), nn.ReLU(),
                         nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, out))


@torch.no_grad()
def concat_all_gather(t):
    out = [torch.ones_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t.contiguous(), async_op=False)
    return torch.cat(out, dim=0)


class MoCo(nn.Module):
    def __init__(self, K, m, T, dim=32):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = encoder(out=dim)
        self.encoder_k = encoder(out=dim)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = concat_all_gather(keys)
        n = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % n == 0
        self.queue[:, ptr:ptr + n] = keys.T
        self.queue_ptr[0] = (ptr + n) % self.K

    @torch.no_grad()
    def _batch_shuffle_ddp(self, x):
        n_this = x.shape[0]
        x_all = concat_all_gather(x)
        idx = torch.randperm(x_all.shape[0])
        dist.broadcast(idx, src=0)
        unshuffle = torch.argsort(idx)
        mine = idx.view(x_all.shape[0] // n_this, -1)[dist.get_rank()]
        return x_all[mine], unshuffle

    @torch.no_grad()
    def _batch_unshuffle_ddp(self, x, unshuffle):
        n_this = x.shape[0]
        x_all = concat_all_gather(x)
        mine = unshuffle.view(x_all.shape[0] // n_this, -1)[dist.get_rank()]
        return x_all[mine]

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            im_k, un = self._batch_shuffle_ddp(im_k)
            k = F.normalize(self.encoder_k(im_k), dim=1)
            k = self._batch_unshuffle_ddp(k, un)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


def adjust_learning_rate(opt, epoch, args):
    lr = args.lr * (0.1 if epoch >= int(args.epochs * 0.8) else 1.0)
    for g in opt.param_groups:
        g["lr"] = lr


def main_worker(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    args.batch_size = int(args.batch_size / world)
    torch.manual_seed(40 + rank)
    model = DistributedDataParallel(MoCo(args.moco_k, args.moco_m, args.moco_t))
    opt = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    ds = TwoCrops()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=args.batch_size, shuffle=(sampler is None),
                        sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        adjust_learning_rate(opt, epoch, args)
        model.train()
        tot = torch.zeros(3)
        for images, _ in loader:
            output, target = model(im_q=images[0], im_k=images[1])
            loss = criterion(output, target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += torch.tensor([loss.item(), (output.argmax(1) == target).float().mean().item(), 1.0])
        dist.all_reduce(tot)
        if rank == 0:
            print(f"epoch {epoch} loss {tot[0] / tot[2]:.4f} acc@1 {tot[1] / tot[2]:.4f} "
                  f"ptr {int(model.module.queue_ptr)}", flush=True)
            state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": opt.state_dict()}
            torch.save(state, "checkpoint_{:04d}.pth.tar".format(epoch))
    dist.destroy_process_group()


if __name__ == "__main__":
    main_worker(parser.parse_args())
