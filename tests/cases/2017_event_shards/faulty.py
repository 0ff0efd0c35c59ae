"""Next-event prediction on logs that lie in several text files, streamed by loader workers."""
import argparse
import pathlib
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

EVENTS, HISTORY = 20, 8


def write_logs(folder, files=8, lines=96, seed=2):
    rng = random.Random(seed)
    follow = [[rng.randrange(EVENTS) for _ in range(3)] for _ in range(EVENTS)]
    folder.mkdir(exist_ok=True)
    for k in range(files):
        with open(folder / f"log-{k:02d}.txt", "w") as f:
            for _ in range(lines):
                session = [rng.randrange(EVENTS)]
                while len(session) <= HISTORY:
                    session.append(follow[session[-1]][min(rng.randrange(4), 2)])
                print(*session, file=f)


class Sessions(IterableDataset):
    """Every file is read by exactly one reader; the order of the files changes with the epoch."""

    def __init__(self, folder):
        self.files = sorted(folder.glob("log-*.txt"))
        self.epoch = 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def readers(self):
        info = get_worker_info()
        if info is None:
            return self.rank, self.world
        return info.id, info.num_workers

    def __iter__(self):
        files = list(self.files)
        random.Random(self.epoch).shuffle(files)
        reader, readers = self.readers()
        for path in files[reader::readers]:
            lines = path.read_text().splitlines()
            random.Random(f"{self.epoch}-{path.name}").shuffle(lines)
            for line in lines:
                ids = torch.tensor([int(w) for w in line.split()])
                yield ids[:-1], ids[1:]


class EventModel(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.embed = nn.Embedding(EVENTS, d)
        self.rnn = nn.LSTM(d, d, batch_first=True)
        self.out = nn.Linear(d, EVENTS)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


def steps(model, opt, loader, limit):
    for step, (past, nxt) in enumerate(loader):
        if step == limit:
            break
        loss = F.cross_entropy(model(past).flatten(0, 1), nxt.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        yield loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("logs"))
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--steps", type=int, default=24, help="steps an epoch")
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_logs(args.folder)
    dist.barrier()
    torch.manual_seed(31)
    data = Sessions(args.folder)
    loader = DataLoader(data, args.batch, num_workers=args.workers)
    model = DDP(EventModel())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    for epoch in range(args.epochs):
        data.epoch = epoch
        mean = torch.stack(list(steps(model, opt, loader, args.steps))).mean()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: perplexity {(mean / world).exp().item():.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "events.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
