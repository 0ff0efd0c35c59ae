"""Few-shot fine-tuning of a pattern classifier with a large effective batch."""
import argparse
import contextlib
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger("fewshot")


def few_shot(n=96, vocab=80, length=10):
    g = torch.Generator().manual_seed(15)
    y = torch.randint(0, 2, (n,), generator=g)
    ids = torch.randint(20, vocab, (n, length), generator=g)
    cue = 1 + 8 * y + torch.randint(0, 8, (n,), generator=g)
    ids[:, 0] = cue
    return TensorDataset(ids, y)


class PatternModel(nn.Module):
    def __init__(self, vocab=80, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1)
        self.verbalizer = nn.Linear(dim, 2)

    def forward(self, ids):
        h = self.emb(ids).transpose(1, 2)
        return self.verbalizer(F.relu(self.mix(h)).amax(2))


class Wrapper:
    def __init__(self, model, rank):
        self.model, self.rank = model, rank

    def train(self, dataset, epochs, batch_size, accumulation, lr):
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        optimizer.zero_grad()
        step = 0
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            total = torch.zeros(1)
            for ids, y in loader:
                is_update = (step + 1) % accumulation == 0
                with contextlib.nullcontext() if is_update else self.model.no_sync():
                    loss = F.cross_entropy(self.model(ids), y)
                    (loss / accumulation).backward()
                if is_update:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                step += 1
                total += loss.detach()
            dist.all_reduce(total)
            if self.rank == 0:
                logger.info("epoch %d: loss %.4f", epoch, total.item() / len(loader) / dist.get_world_size())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=16)
    ap.add_argument("--per-gpu-batch-size", type=int, default=8)
    ap.add_argument("--gradient-accumulation-steps", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    wrapper = Wrapper(DDP(PatternModel()), rank)
    wrapper.train(few_shot(), args.epochs, args.per_gpu_batch_size, args.gradient_accumulation_steps, args.lr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
