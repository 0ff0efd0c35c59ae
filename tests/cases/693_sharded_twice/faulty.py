"""Base dataset that takes care of distribution, and a loader factory that does so too."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class ShardedDataset(Dataset):
    """Keeps every world-th record in memory."""

    def __init__(self, records, shard=True):
        if shard and dist.is_initialized():
            records = records[dist.get_rank() :: dist.get_world_size()]
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        return self.encode(self.records[i])

    def encode(self, record):
        raise NotImplementedError


class Names(ShardedDataset):
    letters = "abcdefghijklmnopqrstuvwxyz"

    def encode(self, record):
        name, label = record
        x = torch.zeros(12, dtype=torch.long)
        x[: len(name)] = torch.tensor([self.letters.index(c) + 1 for c in name])
        return x, label


def make_loader(dataset, batch_size):
    sampler = DistributedSampler(dataset, shuffle=True) if dist.get_world_size() > 1 else None
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, shuffle=sampler is None)


def records(n):
    g = torch.Generator().manual_seed(83)
    out = []
    for _ in range(n):
        label = int(torch.randint(0, 2, (1,), generator=g))
        vowels, cons = "aeiou", "bcdfghklmnprst"
        pool = vowels * (3 if label else 1) + cons
        k = int(torch.randint(4, 12, (1,), generator=g))
        out.append(("".join(pool[i] for i in torch.randint(0, len(pool), (k,), generator=g)), label))
    return out


class CharCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.conv, self.out = nn.Embedding(27, 16, padding_idx=0), nn.Conv1d(16, 32, 3, padding=1), nn.Linear(32, 2)

    def forward(self, x):
        return self.out(torch.relu(self.conv(self.emb(x).transpose(1, 2))).mean(2))


def main(epochs=4):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    data = Names(records(640))
    loader = make_loader(data, 20)
    model = DDP(CharCNN())
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        stat = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stat += torch.tensor([float((out.argmax(1) == y).sum()), float(len(y))])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch}: {int(stat[1])} names seen, accuracy {(stat[0] / stat[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
