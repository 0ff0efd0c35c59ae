"""Curriculum training; a background thread on rank 0 evaluates frozen copies while training goes on."""
import argparse
import copy
import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

VOCAB, MAXLEN = 10, 10


def sums(n, seed):
    """Token lists of growing length; target: how many tokens are 7 or more (at most 4). Short ones are the easy ones."""
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(1, MAXLEN + 1, (n,), generator=g)
    tok = torch.randint(VOCAB, (n, MAXLEN), generator=g)
    mask = torch.arange(MAXLEN)[None] < length[:, None]
    tok = torch.where(mask, tok, torch.full_like(tok, VOCAB))
    big = (torch.where(mask, tok, torch.zeros_like(tok)) >= 7).sum(1)
    return TensorDataset(tok, big.clamp(max=4)), length


class Counter(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB + 1, dim, padding_idx=VOCAB)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(dim, 5)

    def forward(self, t):
        return self.out(self.drop(self.rnn(self.emb(t))[1][0]))


class BackgroundEval:
    def __init__(self, data):
        self.tok, self.y = data.tensors
        self.jobs, self.results = queue.Queue(), []
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def submit(self, tag, net):
        frozen = copy.deepcopy(net).eval()
        for p in frozen.parameters():
            p.requires_grad_(False)
        self.jobs.put((tag, frozen))

    def loop(self):
        while True:
            job = self.jobs.get()
            if job is None:
                return
            tag, net = job
            with torch.no_grad():
                acc = (net(self.tok).argmax(1) == self.y).float().mean().item()
            self.results.append((tag, acc))

    def close(self):
        self.jobs.put(None)
        self.thread.join()
        return self.results


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    ddp = DDP(Counter())
    torch.manual_seed(600 + rank)
    data, length = sums(6000, seed=1)
    held, _ = sums(1500, seed=2)
    easy_first = torch.argsort(length, stable=True)
    opt = torch.optim.AdamW(ddp.parameters(), lr=args.lr, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.85)
    watcher = BackgroundEval(held) if rank == 0 else None

    for epoch in range(args.epochs):
        share = min(1.0, 0.3 + 0.14 * epoch)
        pool = Subset(data, easy_first[:int(share * len(data))].tolist())
        sampler = DistributedSampler(pool, world, rank, shuffle=True, seed=15)
        sampler.set_epoch(epoch)
        loader = DataLoader(pool, batch_size=args.batch, sampler=sampler, drop_last=True)
        seen = torch.zeros(2)
        for tok, y in loader:
            loss = F.cross_entropy(ddp(tok), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            opt.step()
            seen += torch.tensor([loss.item(), 1.0])
        sched.step()
        dist.all_reduce(seen)
        if rank == 0:
            watcher.submit(epoch, ddp.module)
            print(f"epoch {epoch} pool {len(pool)} loss {seen[0] / seen[1]:.4f}", flush=True)

    if rank == 0:
        for tag, acc in watcher.close():
            print(f"  held-out accuracy after epoch {tag}: {acc:.3f}")
        torch.save(ddp.module.state_dict(), "counter.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
