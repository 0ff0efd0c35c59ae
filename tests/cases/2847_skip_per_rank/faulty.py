"""Block-drafting head: predicts the next block of tokens from an anchor inside each conversation."""
import argparse
import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BLOCK = 4
VOCAB = 32


class NoValidAnchorsError(RuntimeError):
    pass


class Conversations(Dataset):
    def __init__(self, n, seed=13):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(2, 24, (1,), generator=g))
            if torch.rand(1, generator=g) < 0.45:
                length = int(torch.randint(2, 2 * BLOCK, (1,), generator=g))
            start = int(torch.randint(0, VOCAB, (1,), generator=g))
            self.rows.append((start + 3 * torch.arange(length)) % VOCAB)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Drafter(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mix = nn.Sequential(nn.Linear(BLOCK * dim, 128), nn.ReLU(), nn.Linear(128, BLOCK * VOCAB))

    def forward(self, context):
        return self.mix(self.embed(context).flatten(1)).view(-1, BLOCK, VOCAB)


def draw_anchors(batch, generator):
    context, target = [], []
    for row in batch:
        room = len(row) - 2 * BLOCK
        if room < 0:
            continue
        at = int(torch.randint(0, room + 1, (1,), generator=generator))
        context.append(row[at:at + BLOCK])
        target.append(row[at + BLOCK:at + 2 * BLOCK])
    if not context:
        raise NoValidAnchorsError("every row of the micro batch is too short")
    return torch.stack(context), torch.stack(target)


def all_ranks_have_valid(local):
    flag = torch.tensor(int(local))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def train_epoch(model, loader, optimizer, generator):
    model.train()
    stat = torch.zeros(3, dtype=torch.float64)
    for batch in loader:
        try:
            context, target = draw_anchors(batch, generator)
            valid = True
        except NoValidAnchorsError:
            valid = False
        if not valid:
            stat[2] += 1
            continue
        logits = model(context)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stat[0] += loss.item() * len(context)
        stat[1] += len(context)
    return stat


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=25))
    rank = dist.get_rank()
    torch.manual_seed(3)
    data = Conversations(400)
    sampler = DistributedSampler(data, shuffle=True, seed=6, drop_last=True)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler, collate_fn=list, drop_last=True)
    model = DDP(Drafter())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(100 + rank)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stat = train_epoch(model, loader, optimizer, generator)
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {stat[0] / stat[1]:.3f} rows {int(stat[1])} skipped {int(stat[2])}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "drafter.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
