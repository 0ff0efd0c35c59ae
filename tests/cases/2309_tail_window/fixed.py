"""Encoder-decoder that sorts short digit strings; large batches through gradient accumulation."""
import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

DIGITS, LEN, BOS = 10, 7, 10

HP = {
    "hidden": 72,
    "micro_batch": 16,
    "accumulate": 4,
    "epochs": 7,
    "lr": 6e-3,
    "samples": 1472,
    "seed": 12,
}


def make_data(n):
    g = torch.Generator().manual_seed(HP["seed"])
    src = torch.randint(0, DIGITS, (n, LEN), generator=g)
    return TensorDataset(src, src.sort(dim=1).values)


class Seq2Seq(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.src_emb = nn.Embedding(DIGITS, hidden)
        self.tgt_emb = nn.Embedding(DIGITS + 1, hidden)
        self.encoder = nn.GRU(hidden, hidden, batch_first=True)
        self.decoder = nn.GRU(hidden, hidden, batch_first=True)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(2 * hidden, DIGITS)

    def forward(self, src, tgt):
        memory, state = self.encoder(self.src_emb(src))
        bos = torch.full_like(tgt[:, :1], BOS)
        dec, _ = self.decoder(self.tgt_emb(torch.cat([bos, tgt[:, :-1]], 1)), state)
        weights = torch.softmax(self.query(dec) @ memory.transpose(1, 2) / memory.size(-1) ** 0.5, -1)
        return self.out(torch.cat([dec, weights @ memory], -1))


def window_size(i, n, k):
    """Number of micro-batches in the accumulation window that micro-batch i belongs to."""
    first = i - i % k
    return min(k, n - first)


def run_epoch(model, loader, opt, loss_fn, clip=1.0):
    n, k = len(loader), HP["accumulate"]
    seen = torch.zeros(3)
    updates = 0
    opt.zero_grad()
    for i, (src, tgt) in enumerate(loader):
        last = i + 1 == n
        reduce_now = (i + 1) % k == 0 or last
        guard = contextlib.nullcontext() if reduce_now else model.no_sync()
        with guard:
            logits = model(src, tgt)
            loss = loss_fn(logits.flatten(0, 1), tgt.flatten())
            (loss / window_size(i, n, k)).backward()
        if reduce_now or last:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
            updates += 1
        right = (logits.argmax(-1) == tgt).sum()
        seen += torch.stack([loss.detach() * tgt.numel(), right.float(), torch.tensor(float(tgt.numel()))])
    dist.all_reduce(seen)
    return seen[0].item() / seen[2].item(), seen[1].item() / seen[2].item(), updates


def main(argv):
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(HP["seed"])
    data = make_data(HP["samples"])
    sampler = DistributedSampler(data, seed=HP["seed"])
    loader = DataLoader(data, batch_size=HP["micro_batch"], sampler=sampler)
    model = DDP(Seq2Seq(HP["hidden"]))
    opt = torch.optim.Adam(model.parameters(), lr=HP["lr"])
    loss_fn = nn.CrossEntropyLoss()

    if rank == 0:
        print(f"{len(loader)} micro-batches per rank, {HP['accumulate']} per update")
    for epoch in range(HP["epochs"]):
        sampler.set_epoch(epoch)
        loss, token_acc, updates = run_epoch(model, loader, opt, loss_fn)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, token acc {token_acc:.3f}, {updates} updates", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "sorter.pt")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
