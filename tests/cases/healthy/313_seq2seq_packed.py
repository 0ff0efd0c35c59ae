"""Reverse a sequence of digits: GRU encoder on packed sequences, GRU decoder, loss averaged over all ranks' tokens."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, BOS, EOS, FIRST = 0, 1, 2, 3


class Reversals(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 9, (n,), generator=g)
        self.items = [torch.randint(FIRST, 13, (int(l),), generator=g) for l in lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        s = self.items[i]
        return s, torch.cat([torch.tensor([BOS]), s.flip(0), torch.tensor([EOS])])


def collate(pairs):
    src, tgt = zip(*pairs)
    return pad_sequence(src, True, PAD), torch.tensor([len(s) for s in src]), pad_sequence(tgt, True, PAD)


class Seq2Seq(nn.Module):
    def __init__(self, vocab=13, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=PAD)
        self.enc = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * d, d)
        self.dec = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, src, lengths, tgt_in):
        packed = pack_padded_sequence(self.emb(src), lengths, batch_first=True, enforce_sorted=False)
        _, h = self.enc(packed)
        h = torch.tanh(self.bridge(torch.cat([h[0], h[1]], -1))).unsqueeze(0)
        y, _ = self.dec(self.emb(tgt_in), h)
        return self.out(y)


def run_epoch(model, loader, optimizer, world):
    ce = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum")
    training = optimizer is not None
    model.train(training)
    stats = torch.zeros(3)
    with torch.set_grad_enabled(training):
        for src, lengths, tgt in loader:
            logits = model(src, lengths, tgt[:, :-1])
            gold = tgt[:, 1:]
            loss_sum = ce(logits.transpose(1, 2), gold)
            tokens = (gold != PAD).sum()
            if training:
                # DDP averages over ranks; ranks have different token counts: divide by the mean count
                everywhere = tokens.clone().float()
                dist.all_reduce(everywhere)
                optimizer.zero_grad()
                (loss_sum * world / everywhere).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            right = ((logits.argmax(-1) == gold) & (gold != PAD)).sum()
            stats += torch.tensor([loss_sum.item(), right.item(), tokens.item()])
    dist.all_reduce(stats)
    return stats[0] / stats[2], stats[1] / stats[2]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--bs", type=int, default=16)
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    model = nn.parallel.DistributedDataParallel(Seq2Seq())
    opt = torch.optim.Adam(model.parameters(), 5e-3)
    train, valid = Reversals(384, 1), Reversals(96, 2)
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, a.bs, sampler=sampler, collate_fn=collate)
    valid_dl = DataLoader(valid, a.bs, sampler=DistributedSampler(valid, shuffle=False), collate_fn=collate)
    for ep in range(a.epochs):
        sampler.set_epoch(ep)
        tl, _ = run_epoch(model, train_dl, opt, world)
        vl, va = run_epoch(model, valid_dl, None, world)
        if rank == 0:
            print(f"epoch {ep} train nll/token {tl:.3f} valid {vl:.3f} token acc {va:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
