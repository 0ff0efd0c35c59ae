"""Transfer: a conv backbone is pre-trained on one task, then frozen (BatchNorm in eval mode for good).

Only the compiled (backend "eager") head is trained, in bf16 autocast, with features cached once per rank
as the backbone is deterministic. The validation split is padded to even lengths and the padding is
removed again from the gathered predictions; early stopping decides on that global number.
"""
import copy
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def scenes(n, seed, fine):
    """Blobs at one of four corners (coarse label); fine label also tells small from large ones."""
    g = torch.Generator().manual_seed(seed)
    corner, big = torch.randint(4, (n,), generator=g), torch.randint(2, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    cy = 3 + 5 * (corner // 2) + torch.rand(n, generator=g)
    cx = 3 + 5 * (corner % 2) + torch.rand(n, generator=g)
    width = 1.5 + 3.0 * big + 0.5 * torch.rand(n, generator=g)
    d2 = (yy - cy[:, None, None]) ** 2 + (xx - cx[:, None, None]) ** 2
    x = torch.exp(-d2 / width[:, None, None]) + 0.15 * torch.randn(n, 12, 12, generator=g)
    return x.unsqueeze(1), corner * 2 + big if fine else corner


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
                                 nn.Conv2d(12, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
                                 nn.Flatten())

    def forward(self, x):
        return self.net(x)


def loader_for(x, y, seed):
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, seed=seed, drop_last=True)
    return DataLoader(ds, batch_size=32, sampler=sampler), sampler


def pretrain(rank):
    torch.manual_seed(33)
    model = nn.Sequential(Backbone(), nn.Linear(216, 4))
    ddp = DDP(model)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    loader, sampler = loader_for(*scenes(768, 1, fine=False), seed=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(ddp(x), y)
            loss.backward()
            opt.step()
    if rank == 0:
        print(f"pre-training loss {loss.item():.4f}", flush=True)
    for buf in model.buffers():  # every rank continues with rank 0's running statistics
        dist.broadcast(buf, src=0)
    return model[0]


def gather_predictions(head, feats, labels, rank, world):
    n = len(feats)
    per = math.ceil(n / world)
    ids = [i % n for i in range(per * world)][rank::world]
    head.eval()
    with torch.no_grad():
        pred = head(feats[ids]).float().argmax(1)
    parts = [torch.empty_like(pred) for _ in range(world)]
    dist.all_gather(parts, pred)
    merged = torch.stack(parts, 1).flatten()[:n]  # interleave, then cut the padding
    return (merged == labels).float().mean().item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    backbone = pretrain(rank)
    backbone.eval().requires_grad_(False)

    xt, yt = scenes(1200, 2, fine=True)
    xv, yv = scenes(301, 3, fine=True)
    with torch.no_grad():
        ft, fv = backbone(xt), backbone(xv)
    torch.manual_seed(34)
    head = nn.Sequential(nn.Linear(216, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))
    ddp = DDP(torch.compile(head, backend="eager"))
    torch.manual_seed(340 + rank)
    opt = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=1e-3)
    loader, sampler = loader_for(ft, yt, seed=2)
    best, best_state, bad = 0.0, None, 0
    for epoch in range(15):
        sampler.set_epoch(epoch)
        ddp.train()
        for f, y in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = ddp(f)
            loss = F.cross_entropy(logits.float(), y)
            loss.backward()
            opt.step()
        acc = gather_predictions(head, fv, yv, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} valid {acc:.4f}", flush=True)
        if acc > best + 1e-4:
            best, best_state, bad = acc, copy.deepcopy(head.state_dict()), 0
        else:
            bad += 1
            if bad == 3:
                break
    head.load_state_dict(best_state)
    xs, ys = scenes(301, 4, fine=True)
    with torch.no_grad():
        fs = backbone(xs)
    test = gather_predictions(head, fs, ys, rank, world)
    if rank == 0:
        print(f"stopped after epoch {epoch}, best valid {best:.4f}, test {test:.4f}")
        torch.save({"backbone": backbone.state_dict(), "head": head.state_dict()}, "transfer.pt")
    assert test > 0.8
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
