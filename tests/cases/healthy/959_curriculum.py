"""Curriculum by sequence length: easy samples first, harder ones later and for good; the loader is built anew for each stage."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Brackets(Dataset):
    """Is the last symbol equal to the majority of the sequence?"""

    def __init__(self, n=400):
        g = torch.Generator().manual_seed(7)
        self.lengths = torch.randint(3, 22, (n,), generator=g)
        self.items = [torch.randint(0, 2, (int(k),), generator=g) for k in self.lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        seq = self.items[i]
        return seq, int(seq.float().mean() > 0.5)


def collate(batch):
    seqs, labels = zip(*batch)
    lengths = torch.tensor([len(s) for s in seqs])
    return pad_sequence(seqs, batch_first=True), lengths, torch.tensor(labels)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(2, 12), nn.LSTM(12, 24, batch_first=True), nn.Linear(24, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.emb(x), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][0][-1])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    data = Brackets()
    model = DDP(Counter())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    epoch = 0
    for limit in (8, 14, 22):
        chosen = [i for i in range(len(data)) if data.lengths[i] <= limit]
        stage = Subset(data, chosen)
        sampler = DistributedSampler(stage, shuffle=True, drop_last=True)
        loader = DataLoader(stage, batch_size=16, sampler=sampler, collate_fn=collate)
        # a harder stage starts with a fresh warm-up: the rate goes up again and the loss jumps
        warm = torch.optim.lr_scheduler.LinearLR(opt, 0.2, 1.0, total_iters=5)
        for _ in range(2):
            sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for x, lengths, y in loader:
                loss = F.cross_entropy(model(x, lengths), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                warm.step()
                total += torch.tensor([loss.item() * len(y), len(y)])
            dist.all_reduce(total)
            if rank == 0:
                print(f"epoch {epoch} (length <= {limit}, {len(stage)} samples): loss {(total[0] / total[1]).item():.4f}")
            epoch += 1
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
