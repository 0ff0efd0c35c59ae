"""Fine-tune a small causal language model after adding task tokens to its vocabulary."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Vocab:
    def __init__(self, base=24):
        self.tokens = [f"w{i}" for i in range(base)]

    def add_tokens(self, names):
        self.tokens.extend(n for n in names if n not in self.tokens)

    def __len__(self):
        return len(self.tokens)

    def id(self, name):
        return self.tokens.index(name)


class TinyLM(nn.Module):
    def __init__(self, vocab, dim=48, length=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.ln = nn.LayerNorm(dim)
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), 1), persistent=False)

    def resize_token_embeddings(self, size):
        old = self.wte
        new = nn.Embedding(size, old.embedding_dim)
        nn.init.normal_(new.weight, std=0.02)
        with torch.no_grad():
            new.weight[:old.num_embeddings] = old.weight
        self.wte = new

    def forward(self, ids, labels):
        length = ids.size(1)
        h = self.wte(ids) + self.wpe(torch.arange(length, device=ids.device))
        h = self.ln(self.blocks(h, mask=self.mask[:length, :length]))
        logits = F.linear(h, self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


class TaggedSequences(Dataset):
    """<up> <sep> a a+1 a+2 ... ; <down> <sep> a a-1 a-2 ..."""

    def __init__(self, vocab, count, seed):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 24, (count, 1), generator=g)
        task = torch.randint(0, 2, (count,), generator=g)
        tags = torch.tensor([vocab.id("<up>"), vocab.id("<down>")])
        stride = torch.where(task == 0, 1, -1)[:, None]
        words = (start + stride * torch.arange(12)) % 24
        self.ids = torch.cat([tags[task][:, None], torch.full((count, 1), vocab.id("<sep>")), words], 1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        labels = ids[1:].clone()
        labels[:2] = -100
        return ids[:-1], labels


class Finetuner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.vocab = Vocab()
        model = TinyLM(len(self.vocab))
        self.optimizer = self.build_optimizer(model)
        self.vocab.add_tokens(["<up>", "<down>", "<sep>"])
        model.resize_token_embeddings(len(self.vocab))
        self.model = DDP(model)
        train = TaggedSequences(self.vocab, 960, 1)
        valid = TaggedSequences(self.vocab, 256, 2)
        self.sampler = DistributedSampler(train, seed=args.seed)
        self.train_loader = DataLoader(train, args.batch_size, sampler=self.sampler, drop_last=True)
        self.valid_loader = DataLoader(valid, 64, sampler=DistributedSampler(valid, shuffle=False))
        total = args.epochs * len(self.train_loader)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min(1.0, (s + 1) / 20) * max(0.05, 1 - s / total))

    def build_optimizer(self, model):
        decay = [p for p in model.parameters() if p.dim() > 1]
        other = [p for p in model.parameters() if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": other, "weight_decay": 0.0}],
                                 lr=self.args.lr)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        acc = torch.zeros(2)
        for ids, labels in self.train_loader:
            loss, _ = self.model(ids, labels)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            acc += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(acc)
        return (acc[0] / acc[1]).item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        acc = torch.zeros(2)
        for ids, labels in self.valid_loader:
            _, logits = self.model.module(ids, labels)
            keep = labels != -100
            acc += torch.tensor([(logits.argmax(-1)[keep] == labels[keep]).sum().item(), keep.sum().item()])
        dist.all_reduce(acc)
        return (acc[0] / acc[1]).item()

    def run(self):
        log = []
        for epoch in range(self.args.epochs):
            log.append({"epoch": epoch, "loss": self.train_epoch(epoch), "token_acc": self.validate()})
            if self.rank == 0:
                print(log[-1], flush=True)
        if self.rank == 0:
            with open("finetune_log.json", "w") as f:
                json.dump(log, f)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=3)
    cli = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Finetuner(cli).run()
    dist.destroy_process_group()
