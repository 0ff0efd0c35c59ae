"""Direct preference optimisation of a small causal model after a short SFT phase."""
import argparse
import copy
import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = 0
log = logging.getLogger("dpo")


class Preferences(Dataset):
    """prompt + chosen (ascending walk) / rejected (descending walk)."""

    def __init__(self, n, vocab, prompt_len, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            start = int(torch.randint(1, vocab, (1,), generator=g))
            prompt = torch.randint(1, vocab, (prompt_len,), generator=g)
            prompt[-1] = start
            len_c, len_r = torch.randint(4, 9, (2,), generator=g).tolist()
            up = torch.tensor([(start - 1 + k) % (vocab - 1) + 1 for k in range(1, len_c + 1)])
            down = torch.tensor([(start - 1 - k) % (vocab - 1) + 1 for k in range(1, len_r + 1)])
            self.rows.append((prompt, up, down))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    def pack(which):
        seqs = [torch.cat([r[0], r[which]]) for r in rows]
        ids = nn.utils.rnn.pad_sequence(seqs, batch_first=True, padding_value=PAD)
        mask = (ids != PAD).float()
        mask[:, : len(rows[0][0])] = 0
        return ids, mask

    return pack(1), pack(2)


class TinyCausal(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.head(h)


def sequence_logprob(logits, ids, mask):
    lp = F.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (lp * mask[:, 1:]).sum(-1)


def both(model, chosen, rejected):
    width = max(chosen[0].size(1), rejected[0].size(1))
    ids = torch.cat([F.pad(t[0], (0, width - t[0].size(1)), value=PAD) for t in (chosen, rejected)])
    mask = torch.cat([F.pad(t[1], (0, width - t[1].size(1))) for t in (chosen, rejected)])
    lp = sequence_logprob(model(ids), ids, mask)
    return lp.chunk(2)


def sft(model, loader, sampler, epochs, lr):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for chosen, rejected in loader:
            c, r = both(model, chosen, rejected)
            n = chosen[1].sum() + rejected[1].sum()
            loss = -(c.sum() + r.sum()) / n
            opt.zero_grad()
            loss.backward()
            opt.step()
    return loss.item()


def dpo(model, reference, loader, sampler, args):
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(100 + epoch)
        stats = torch.zeros(4)
        for chosen, rejected in loader:
            with torch.no_grad():
                ref_c, ref_r = both(reference, chosen, rejected)
            pol_c, pol_r = both(model, chosen, rejected)
            margin = args.beta * ((pol_c - ref_c) - (pol_r - ref_r))
            loss = -F.logsigmoid(margin).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            acc = (pol_c > pol_r).float().sum()
            stats += torch.stack([loss.detach() * len(margin), margin.detach().sum(), acc, torch.tensor(float(len(margin)))])
        dist.all_reduce(stats)
        log.info("epoch %d loss %.4f margin %.3f acc %.3f", epoch, *(stats[:3] / stats[3]).tolist())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--beta", type=float, default=0.2)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--sft-epochs", type=int, default=3)
    ap.add_argument("--vocab", type=int, default=24)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(42)

    data = Preferences(512, args.vocab, 4, seed=9)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler, collate_fn=collate)
    policy = TinyCausal(args.vocab)
    model = DDP(policy)
    log.info("sft loss %.4f", sft(model, loader, sampler, args.sft_epochs, 5e-3))

    reference = copy.deepcopy(policy).eval()
    dpo(model, reference, loader, sampler, args)
    if rank == 0:
        torch.save(policy.state_dict(), "policy.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
