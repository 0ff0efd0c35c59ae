import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PAD, BOS, VOCAB = 0, 1, 30


class Pairs(torch.utils.data.Dataset):
    """Source: random symbols; target: the same reversed."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(2, VOCAB, (int(torch.randint(3, 13, (1,), generator=g)),), generator=g) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], torch.cat([torch.tensor([BOS]), self.rows[i].flip(0)])


def collate(items):
    src = nn.utils.rnn.pad_sequence([a for a, _ in items], batch_first=True, padding_value=PAD)
    tgt = nn.utils.rnn.pad_sequence([b for _, b in items], batch_first=True, padding_value=PAD)
    return src, tgt


class Seq2Seq(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d, padding_idx=PAD)
        pos = torch.arange(16).unsqueeze(1) * torch.exp(torch.arange(0, d, 2) * (-math.log(100.0) / d))
        self.register_buffer("pe", torch.cat([pos.sin(), pos.cos()], 1))
        self.core = nn.Transformer(d, 4, 1, 1, 96, dropout=0.0, batch_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1]).isinf()
        s = self.emb(src) + self.pe[:src.shape[1]]
        t = self.emb(tgt) + self.pe[:tgt.shape[1]]
        h = self.core(s, t, tgt_mask=mask, src_key_padding_mask=src == PAD, memory_key_padding_mask=src == PAD,
                      tgt_key_padding_mask=tgt == PAD)
        return self.out(h)


def token_mean(logits, gold, denom):
    ce = F.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=0.05)
    return ce / denom


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = Seq2Seq()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    data = Pairs(2560, seed=6)
    sampler = torch.utils.data.DistributedSampler(data, world, rank, seed=4, drop_last=True)
    loader = torch.utils.data.DataLoader(data, 32, sampler=sampler, collate_fn=collate, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        window, logged, tokens_seen = [], 0.0, 0.0
        for batch in loader:
            window.append(batch)
            if len(window) < args.accum:
                continue
            # tokens of the whole step: every micro-batch on every rank
            denom = torch.tensor(float(sum((t[:, 1:] != PAD).sum().item() for _, t in window)))
            dist.all_reduce(denom)
            opt.zero_grad()
            step_loss = torch.zeros(())
            for src, tgt in window:
                loss = token_mean(model(src, tgt[:, :-1]), tgt[:, 1:], denom)
                loss.backward()
                step_loss += loss.detach()
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            window.clear()
            dist.all_reduce(step_loss)
            logged += step_loss.item() * denom.item()
            tokens_seen += denom.item()
        if rank == 0:
            print(f"epoch {epoch}: nll/token {logged / tokens_seen:.4f} over {int(tokens_seen)} tokens", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
