"""Sentence encoder on variable-length sequences (batches padded to their longest)."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    """Sorted by length so that a batch needs little padding."""

    def __init__(self, n, rank, world):
        g = torch.Generator().manual_seed(61)
        lengths = torch.randint(4, 400, (n,), generator=g).sort().values.tolist()
        items = [torch.randint(1, 40, (k,), generator=g) for k in lengths]
        self.items = items[rank::world]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        x = self.items[i]
        return x, (x < 20).float().mean()


def collate(batch):
    xs, ys = zip(*batch)
    return pad_sequence(xs, batch_first=True), torch.stack(ys)


class Encoder(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.embed = nn.Embedding(40, d, padding_idx=0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 128, dropout=0.0, batch_first=True) for _ in range(2))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        pad = x == 0
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=pad)
        h = h.masked_fill(pad[..., None], 0).sum(1) / (~pad).sum(1, keepdim=True)
        return torch.sigmoid(self.out(h)).squeeze(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--sentences", type=int, default=640)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Sentences(args.sentences, rank, world)
    order = torch.Generator().manual_seed(5)
    model = DDP(Encoder())
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        starts = (torch.randperm(len(data) // args.batch_size, generator=order) * args.batch_size).tolist()
        batches = [list(range(s, s + args.batch_size)) for s in starts]
        loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
        t0, total = time.time(), torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {total[0] / total[1]:.4f} in {time.time() - t0:.1f}s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
