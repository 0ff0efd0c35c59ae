"""One driver, several mp.spawn calls: train on 2, go on from the checkpoint on 2, evaluate on 1."""
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TOTAL_EPOCHS, BATCH = 4, 32


def seqs(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, 4, generator=g)
    return TensorDataset(x, (x[:, :, 0].cumsum(1).max(1).values > 2.0).long())


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 32, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(32, 2)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(self.drop(out.amax(1)))


def join(rank, world, rdzv):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rdzv}", rank=rank, world_size=world)


def train_worker(rank, world, rdzv, ckpt, until):
    join(rank, world, rdzv)
    torch.manual_seed(3)
    model = DDP(Tagger())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ds = seqs(1024, 1)
    sampler = DistributedSampler(ds, shuffle=True, seed=19)
    dl = DataLoader(ds, batch_size=BATCH, sampler=sampler, drop_last=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, TOTAL_EPOCHS * len(dl))
    start = 0
    if os.path.exists(ckpt):
        state = torch.load(ckpt, map_location="cpu", weights_only=True)
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        start = state["epoch"]
    torch.manual_seed(10_000 + 100 * start + rank)
    for epoch in range(start, until):
        sampler.set_epoch(epoch)
        model.train()
        agg = torch.zeros(2, dtype=torch.float64)
        for x, y in dl:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            agg += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
        dist.all_reduce(agg)
        if rank == 0:
            print(f"epoch {epoch} loss {agg[0] / agg[1]:.4f} lr {sched.get_last_lr()[0]:.1e}", flush=True)
    if rank == 0:
        state = {"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "epoch": until}
        torch.save(state, ckpt + ".tmp")
        os.replace(ckpt + ".tmp", ckpt)
    dist.barrier()
    dist.destroy_process_group()


def eval_worker(rank, world, rdzv, ckpt, out):
    join(rank, world, rdzv)
    net = Tagger()
    net.load_state_dict(torch.load(ckpt, map_location="cpu", weights_only=True)["model"])
    net.eval()
    ds = seqs(500, 2)
    dl = DataLoader(ds, batch_size=100, sampler=DistributedSampler(ds, shuffle=False))
    c = torch.zeros(2, dtype=torch.long)
    with torch.no_grad():
        for x, y in dl:
            c[0] += (net(x).argmax(1) == y).sum()
            c[1] += len(y)
    dist.all_reduce(c)
    if rank == 0:
        with open(out, "w") as f:
            f.write(f"{c[0].item() / c[1].item():.4f}\n")
    dist.destroy_process_group()


def session(fn, world, *args):
    with tempfile.TemporaryDirectory(dir="work") as d:
        mp.spawn(fn, args=(world, os.path.abspath(os.path.join(d, "store")), *args), nprocs=world, join=True)


def main():
    os.makedirs("work", exist_ok=True)
    ckpt = "work/tagger.pt"
    if os.path.exists(ckpt):
        os.remove(ckpt)
    session(train_worker, 2, ckpt, TOTAL_EPOCHS // 2)
    session(train_worker, 2, ckpt, TOTAL_EPOCHS)
    session(eval_worker, 1, ckpt, "work/acc.txt")
    with open("work/acc.txt") as f:
        print("test accuracy", f.read().strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
