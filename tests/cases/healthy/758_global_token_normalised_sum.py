"""Translation-like toy with ragged targets: the loss is a *sum* over tokens, divided by the global number of tokens and multiplied by the
world size, so that DDP's mean over ranks gives the exact mean over all tokens."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, V = 0, 20


class Copies(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(8)
        self.rows = [torch.randint(1, V, (int(torch.randint(3, 14, (1,), generator=g)),), generator=g) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    x = pad_sequence(rows, batch_first=True, padding_value=PAD)
    return x, torch.where(x == PAD, PAD, V - x)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(V, 24, padding_idx=PAD)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.o = nn.Linear(32, V)

    def forward(self, x):
        return self.o(self.rnn(self.e(x))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    net = DDP(Tagger())
    opt = torch.optim.Adam(net.parameters(), 5e-3)
    ds = Copies(384)
    smp = DistributedSampler(ds, drop_last=True)
    dl = DataLoader(ds, 16, sampler=smp, collate_fn=collate)
    for ep in range(4):
        smp.set_epoch(ep)
        seen = torch.zeros(2)
        for x, y in dl:
            logits = net(x)
            nll = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
            n = (y != PAD).sum().float()
            total = n.clone()
            dist.all_reduce(total)
            loss = nll * world / total
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += torch.stack([nll.detach(), n])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {ep} nll/token {(seen[0] / seen[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
