"""Character-level language model over streamed document shards."""
import math
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

VOCAB, SEQ = 48, 33
N_SHARDS, DOCS_PER_SHARD = 16, 32


def transition_table():
    rng = np.random.default_rng(11)
    return rng.dirichlet(np.full(VOCAB, 0.05), size=VOCAB).cumsum(1)


def read_shard(shard, table):
    """Stands for opening shard-%05d.tar: yields documents one after the other."""
    rng = np.random.default_rng(5000 + shard)
    for _ in range(DOCS_PER_SHARD):
        tok = np.empty(SEQ, dtype=np.int64)
        tok[0] = rng.integers(VOCAB)
        draws = rng.random(SEQ)
        for t in range(1, SEQ):
            tok[t] = min(int(np.searchsorted(table[tok[t - 1]], draws[t])), VOCAB - 1)
        yield tok


class ShardStream(IterableDataset):
    def __init__(self, shards, shuffle_buffer=64, seed=0):
        super().__init__()
        self.shards = list(shards)
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.epoch = 0
        self.table = transition_table()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _my_shards(self, rng):
        info = get_worker_info()
        wid, n_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        rank, world = 0, 1
        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        order = rng.permutation(len(self.shards))
        return [self.shards[i] for i in order[rank * n_workers + wid::world * n_workers]]

    def __iter__(self):
        rng = np.random.default_rng((self.seed, self.epoch))
        buf = []
        for shard in self._my_shards(rng):
            for doc in read_shard(shard, self.table):
                buf.append(doc)
                if len(buf) >= self.shuffle_buffer:
                    yield torch.from_numpy(buf.pop(int(rng.integers(len(buf)))))
        while buf:
            yield torch.from_numpy(buf.pop(int(rng.integers(len(buf)))))


class CharLM(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, tok):
        h, _ = self.rnn(self.emb(tok))
        return self.out(self.drop(h))


def nll(model, tok):
    logits = model(tok[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCAB), tok[:, 1:].reshape(-1))


@torch.no_grad()
def perplexity(net, rank, world):
    net.eval()
    table, total = transition_table(), torch.zeros(2, dtype=torch.float64)
    held_out = [900 + i for i in range(4)]
    for shard in held_out[rank::world]:
        tok = torch.from_numpy(np.stack(list(read_shard(shard, table))))
        total += torch.tensor([nll(net, tok).item() * len(tok), len(tok)], dtype=torch.float64)
    dist.all_reduce(total)
    net.train()
    return math.exp(total[0] / total[1])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DDP(CharLM())
    torch.manual_seed(1 + rank)

    stream = ShardStream(range(N_SHARDS), seed=3)
    # the tokenizer library is not fork safe, hence spawn
    loader = DataLoader(stream, batch_size=16, num_workers=1, drop_last=True, multiprocessing_context="spawn")
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    total_steps, step = 32, 0
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1.0, (s + 1) / 5) * (0.1 + 0.9 * max(0.0, 1 - s / total_steps)))

    epoch = 0
    while step < total_steps:
        stream.set_epoch(epoch)
        seen, running, t0 = 0, 0.0, time.perf_counter()
        for tok in loader:
            loss = nll(model, tok)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            running += loss.item()
            seen += 1
            step += 1
            if step >= total_steps:
                break
        mean = torch.tensor([running, seen])
        dist.all_reduce(mean)
        ppl = perplexity(model.module, rank, world)
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {mean[0] / mean[1]:.4f} val_ppl {ppl:.3f} "
                  f"{time.perf_counter() - t0:.1f}s", flush=True)
        epoch += 1
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
