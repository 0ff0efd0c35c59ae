"""Length-bucketed sequence tagging. The job runs in segments (queue limit), each segment resumes from the last one."""
import os
import socket
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

CKPT = "segment.pt"


@dataclass
class Job:
    world: int = 2
    segment_epochs: int = 2
    segments: int = 2
    batch: int = 16
    lr: float = 3e-3
    warmup_steps: int = 20
    seed: int = 5

    @property
    def epochs(self):
        return self.segment_epochs * self.segments


class Brackets(Dataset):
    """Tag every token with the (clipped) nesting depth of a noisy bracket sequence."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(6, 31, (), generator=g))
            x = torch.randint(0, 6, (length,), generator=g)
            delta = (x < 2).long() - (x == 2).long() - (x == 3).long()
            depth, tags = 0, []
            for d in delta.tolist():
                depth = min(max(depth + d, 0), 4)
                tags.append(depth)
            self.items.append((x, torch.tensor(tags)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class BucketBatches(Sampler):
    def __init__(self, lengths, batch, rank, world, seed):
        self.lengths, self.batch, self.rank, self.world, self.seed = torch.tensor(lengths), batch, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return len(self.lengths) // (self.batch * self.world)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        key = self.lengths + torch.rand(len(self.lengths), generator=g) * 3
        order = key.argsort()[: len(self) * self.batch * self.world].view(len(self), self.world, self.batch)
        for b in torch.randperm(len(self), generator=g).tolist():
            yield order[b, self.rank].tolist()


def collate(items):
    xs, ys = zip(*items)
    return pad_sequence(xs, True, 6), pad_sequence(ys, True, -100)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 32, padding_idx=6)
        self.rnn = nn.LSTM(32, 64, batch_first=True)
        self.out = nn.Linear(64, 5)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def restore(model, optimizer, rank):
    box = [None]
    if rank == 0 and os.path.exists(CKPT):
        box = [torch.load(CKPT)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return {"epoch": 0, "step": 0, "best": 0.0}
    model.load_state_dict(box[0]["model"])
    optimizer.load_state_dict(box[0]["optimizer"])
    return box[0]["progress"]


def lr_at(job, step, total):
    return job.lr * min((step + 1) / job.warmup_steps, 1.0) * (1 - 0.9 * step / total)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    c = torch.zeros(2)
    for x, y in loader:
        hit, mask = model(x).argmax(-1) == y, y != -100
        c += torch.stack([(hit & mask).sum(), mask.sum()])
    dist.all_reduce(c)
    model.train()
    return (c[0] / c[1]).item()


def segment(rank, job, port, index):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=job.world)
    torch.manual_seed(job.seed)
    net = Tagger()
    optimizer = torch.optim.Adam(net.parameters(), lr=job.lr, betas=(0.9, 0.99))
    progress = restore(net, optimizer, rank)
    model = DDP(net)

    train, val = Brackets(1024, 1), Brackets(256, 2)
    batches = BucketBatches([len(x) for x, _ in train.items], job.batch, rank, job.world, job.seed)
    loader = DataLoader(train, batch_sampler=batches, collate_fn=collate)
    val_loader = DataLoader(val, 64, sampler=range(rank, len(val), job.world), collate_fn=collate)
    total = len(batches) * job.epochs

    first = progress["epoch"]
    for epoch in range(first, first + job.segment_epochs):
        batches.epoch = epoch
        running = torch.zeros(2)
        for x, y in loader:
            for g in optimizer.param_groups:
                g["lr"] = lr_at(job, progress["step"], total)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            progress["step"] += 1
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        acc = evaluate(net, val_loader)
        progress["epoch"] = epoch + 1
        progress["best"] = max(progress["best"], acc)
        if rank == 0:
            print(f"[segment {index}] epoch {epoch} loss {running[0] / running[1]:.4f} acc {acc:.4f}", flush=True)
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}, CKPT + ".tmp")
            os.replace(CKPT + ".tmp", CKPT)
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    job = Job()
    if "--resume" not in sys.argv and os.path.exists(CKPT):
        os.remove(CKPT)
    for index in range(job.segments):
        mp.spawn(segment, args=(job, free_port(), index), nprocs=job.world)


if __name__ == "__main__":
    main()
