"""minGPT-like trainer with snapshots on the number sorting task."""
import os
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any, Dict, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int = 6
    batch_size: int = 32
    data_loader_workers: int = 0
    grad_norm_clip: float = 1.0
    snapshot_path: Optional[str] = "gpt_snapshot.pt"
    save_every: int = 2
    use_amp: bool = True


@dataclass
class OptimizerConfig:
    learning_rate: float = 4e-3
    weight_decay: float = 0.1


@dataclass
class Snapshot:
    model_state: "OrderedDict[str, torch.Tensor]"
    optimizer_state: Dict[str, Any]
    finished_epoch: int


class SortDataset(Dataset):
    """[3 1 2 -> 1 2 3], only the answer part is scored."""

    def __init__(self, size, length=5, digits=4, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.inp = torch.randint(0, digits, (size, length), generator=g)
        self.length, self.vocab_size, self.block_size = length, digits, 2 * length - 1

    def __len__(self):
        return len(self.inp)

    def __getitem__(self, idx):
        inp = self.inp[idx]
        cat = torch.cat([inp, inp.sort().values])
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class CausalBlock(nn.Module):
    def __init__(self, d, heads, block):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, heads, dropout=0.05, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.05))
        self.register_buffer("mask", torch.triu(torch.ones(block, block, dtype=torch.bool), 1), persistent=False)

    def forward(self, x):
        h = self.ln1(x)
        t = x.size(1)
        x = x + self.attn(h, h, h, attn_mask=self.mask[:t, :t], need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab, block, d=48, heads=4, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Parameter(torch.zeros(1, block, d))
        self.blocks = nn.Sequential(*[CausalBlock(d, heads, block) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, vocab, bias=False))

    def forward(self, idx, targets=None):
        logits = self.head(self.blocks(self.tok(idx) + self.pos[:, : idx.size(1)]))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss


def create_optimizer(model, cfg):
    decay, rest = [], []
    for name, p in model.named_parameters():
        (decay if p.dim() > 1 and "tok" not in name and "pos" not in name else rest).append(p)
    return torch.optim.AdamW([{"params": decay, "weight_decay": cfg.weight_decay},
                              {"params": rest, "weight_decay": 0.0}], lr=cfg.learning_rate, betas=(0.9, 0.95))


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset, test_dataset):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = self._prepare_dataloader(train_dataset, True)
        self.test_loader = self._prepare_dataloader(test_dataset, False)
        self.epochs_run = 0
        self.model, self.optimizer = model, optimizer
        self._load_snapshot()
        self.model = DDP(self.model)

    def _prepare_dataloader(self, dataset, shuffle):
        return DataLoader(dataset, batch_size=self.config.batch_size, num_workers=self.config.data_loader_workers,
                          sampler=DistributedSampler(dataset, shuffle=shuffle))

    def _load_snapshot(self):
        if not os.path.exists(self.config.snapshot_path):
            if self.global_rank == 0:
                print("Snapshot not found. Training model from scratch")
            return
        snapshot = Snapshot(**torch.load(self.config.snapshot_path, map_location="cpu", weights_only=True))
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch
        print(f"[RANK{self.global_rank}] Resuming training from snapshot at Epoch {self.epochs_run}")

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train), torch.amp.autocast("cpu", dtype=torch.bfloat16,
                                                               enabled=self.config.use_amp):
            logits, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
        keep = targets >= 0
        hit = ((logits.argmax(-1) == targets) & keep).sum()
        return loss.detach().float() * keep.sum(), hit, keep.sum()

    def _run_epoch(self, epoch, loader, train=True):
        loader.sampler.set_epoch(epoch)
        self.model.train(train)
        sums = torch.zeros(3, dtype=torch.float64)
        for source, targets in loader:
            sums += torch.stack([v.double() for v in self._run_batch(source, targets, train)])
        dist.all_reduce(sums)
        if self.global_rank == 0:
            print(f"Epoch {epoch} | {'train' if train else 'eval '} | loss {sums[0] / sums[2]:.4f} "
                  f"| digit acc {sums[1] / sums[2]:.3f}")

    def _save_snapshot(self, epoch):
        snapshot = Snapshot(model_state=self.model.module.state_dict(), optimizer_state=self.optimizer.state_dict(),
                            finished_epoch=epoch)
        torch.save(asdict(snapshot), self.config.snapshot_path)
        print(f"Snapshot saved at epoch {epoch}")

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            epoch += 1
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.global_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)
            self._run_epoch(epoch, self.test_loader, train=False)


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(42 + dist.get_rank())
    train_set, test_set = SortDataset(1600, seed=1), SortDataset(256, seed=2)
    model = GPT(train_set.vocab_size, train_set.block_size)
    optimizer = create_optimizer(model, OptimizerConfig())
    Trainer(TrainerConfig(), model, optimizer, train_set, test_set).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
