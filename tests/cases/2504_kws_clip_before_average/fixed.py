"""Keyword spotting with a GRU; plain torch.distributed, gradients averaged by hand."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

CLASSES, MELS, FRAMES = 8, 20, 40
EPOCHS, BATCH, LR, MAX_NORM = 5, 16, 0.3, 0.25


def make_clips(n, seed):
    """A chirp per class (start bin, slope) over noise; loudness differs a lot between clips."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    t = torch.arange(FRAMES).float() / FRAMES
    start = 2.0 + 2.0 * (y % 4).float()
    slope = torch.where(y >= 4, 9.0, 1.0)
    centre = start[:, None] + slope[:, None] * t[None]
    bins = torch.arange(MELS).float()
    x = torch.exp(-0.5 * (bins[None, None] - centre[..., None]) ** 2)
    gain = torch.exp(1.0 * torch.randn(n, 1, 1, generator=g))
    x = gain * x + 0.3 * torch.randn(n, FRAMES, MELS, generator=g)
    return x, y


class KWS(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.front = nn.Linear(MELS, 32)
        self.rnn = nn.GRU(32, hidden, batch_first=True)
        self.out = nn.Linear(hidden, CLASSES)

    def forward(self, x):
        h, _ = self.rnn(torch.relu(self.front(x)))
        return self.out(h.mean(1))


def broadcast_params(model):
    for t in list(model.parameters()) + list(model.buffers()):
        dist.broadcast(t.data, src=0)


def average_gradients(model, world):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for g in grads:
        g.copy_(flat[at:at + g.numel()].view_as(g))
        at += g.numel()


def epoch_indices(n, epoch, rank, world):
    perm = torch.randperm(n, generator=torch.Generator().manual_seed(900 + epoch))
    per_rank = n // (world * BATCH) * BATCH
    return perm[rank::world][:per_rank].split(BATCH)


def run_epoch(model, opt, x, y, batches, world):
    model.train()
    stat = torch.zeros(3)
    for idx in batches:
        logits = model(x[idx])
        loss = F.cross_entropy(logits, y[idx])
        opt.zero_grad()
        loss.backward()
        average_gradients(model, world)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
        stat += torch.tensor([loss.item(), norm.item(), 1.0])
    dist.all_reduce(stat)
    return (stat[:2] / stat[2]).tolist()


@torch.no_grad()
def accuracy(model, x, y, rank, world):
    model.eval()
    xs, ys = x[rank::world], y[rank::world]
    right = torch.tensor([(model(xs).argmax(1) == ys).sum().item(), len(ys)], dtype=torch.float64)
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_clips(1600, 1)
    xv, yv = make_clips(400, 2)

    torch.manual_seed(20 + rank)
    model = KWS()
    broadcast_params(model)
    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS)
    best = 0.0
    for epoch in range(EPOCHS):
        loss, norm = run_epoch(model, opt, x, y, epoch_indices(len(x), epoch, rank, world), world)
        sched.step()
        acc = accuracy(model, xv, yv, rank, world)
        if rank == 0:
            print(f"[{epoch}] loss {loss:.4f} grad-norm {norm:.3f} val-acc {acc:.3f}", flush=True)
            if acc > best:
                torch.save({"model": model.state_dict(), "epoch": epoch, "acc": acc}, "kws.tmp")
                os.replace("kws.tmp", "kws_best.pt")
        best = max(best, acc)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
