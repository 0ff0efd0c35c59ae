"""minGPT-ddp: config dataclasses, snapshot with GradScaler, adder data instead of a text file."""
import os
import tempfile
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
import torch.nn as nn
from torch.distributed import barrier, destroy_process_group, get_rank, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclass
class GPTConfig:
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32
    vocab_size: int = 10
    block_size: int = 12


@dataclass
class TrainerConfig:
    max_epochs: int = 4
    batch_size: int = 16
    data_loader_workers: int = 0
    grad_norm_clip: float = 1.0
    snapshot_path: Optional[str] = None
    save_every: int = 1
    use_amp: bool = True


@dataclass
class Snapshot:
    model_state: "OrderedDict[str, torch.Tensor]"
    optimizer_state: dict
    finished_epoch: int


class DigitSums(Dataset):
    def __init__(self, n, block):
        g = torch.Generator().manual_seed(5)
        a = torch.randint(0, 10, (n, block), generator=g)
        self.seq = torch.cat([a[:, :1], a.cumsum(1) % 10], 1)

    def __len__(self):
        return len(self.seq)

    def __getitem__(self, i):
        s = self.seq[i]
        return s[:-1], s[1:]


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn = nn.MultiheadAttention(c.n_embd, c.n_head, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.ones(c.block_size, c.block_size, dtype=torch.bool), 1))
        self.mlp = nn.Sequential(nn.Linear(c.n_embd, 4 * c.n_embd), nn.GELU(), nn.Linear(4 * c.n_embd, c.n_embd), nn.Dropout(0.1))

    def forward(self, x):
        t = x.size(1)
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=self.mask[:t, :t], need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.n_embd)
        self.pos = nn.Parameter(torch.zeros(1, c.block_size, c.n_embd))
        self.blocks = nn.Sequential(*[Block(c) for _ in range(c.n_layer)])
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.blocks(self.tok(idx) + self.pos[:, : idx.size(1)])
        logits = self.head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


def create_optimizer(model, lr=3e-3, wd=0.1):
    decay, no_decay = [], []
    for n, p in model.named_parameters():
        (decay if p.dim() >= 2 and not n.startswith(("tok", "pos")) else no_decay).append(p)
    return torch.optim.AdamW([{"params": decay, "weight_decay": wd}, {"params": no_decay, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95))


class Trainer:
    def __init__(self, config: TrainerConfig, model, optimizer, train_set: Dataset, test_set: Optional[Dataset] = None):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = self._prepare(train_set)
        self.test_loader = self._prepare(test_set) if test_set else None
        self.epochs_run = 0
        self.model, self.optimizer = model, optimizer
        self.save_every = config.save_every
        if config.use_amp:
            self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self._load_snapshot()
        self.model = DDP(self.model)

    def _prepare(self, ds):
        return DataLoader(ds, batch_size=self.config.batch_size, shuffle=False, num_workers=self.config.data_loader_workers, sampler=DistributedSampler(ds))

    def _load_snapshot(self):
        try:
            data = torch.load(self.config.snapshot_path, map_location="cpu", weights_only=False)
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch")
            return
        snap = Snapshot(**data)
        self.model.load_state_dict(snap.model_state)
        self.optimizer.load_state_dict(snap.optimizer_state)
        self.epochs_run = snap.finished_epoch
        print(f"Resuming training from snapshot at Epoch {self.epochs_run}")

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train), torch.amp.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.use_amp):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def _run_epoch(self, epoch, loader, train=True):
        self.model.train(train)
        loader.sampler.set_epoch(epoch)
        for it, (s, t) in enumerate(loader):
            kind = "Train" if train else "Eval"
            loss = self._run_batch(s, t, train)
            if it % 5 == 0:
                print(f"[RANK{self.global_rank}] Epoch {epoch} | Iter {it} | {kind} Loss {loss:.5f}")

    def _save_snapshot(self, epoch):
        raw = self.model.module if hasattr(self.model, "module") else self.model
        snap = Snapshot(raw.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snap), self.config.snapshot_path)
        print(f"Snapshot saved at epoch {epoch}")

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            epoch += 1
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)
            if self.test_loader:
                self._run_epoch(epoch, self.test_loader, train=False)


def main():
    init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(42)
    cfg = GPTConfig()
    full = DigitSums(400, cfg.block_size)
    train_set, test_set = random_split(full, [336, 64], generator=torch.Generator().manual_seed(0))
    model = GPT(cfg)
    optimizer = create_optimizer(model)
    path = os.path.join(tempfile.gettempdir(), f"gpt_snapshot_{os.environ['MASTER_PORT']}_{os.getppid()}.pt")
    Trainer(TrainerConfig(snapshot_path=path), model, optimizer, train_set, test_set).train()
    barrier()
    if get_rank() == 0 and os.path.exists(path):
        os.remove(path)
    destroy_process_group()


if __name__ == "__main__":
    main()
