"""The annotated transformer's distributed training: spawned workers, Noam LambdaLR, label smoothing by KL, SimpleLossCompute, a file per epoch from the main process."""
import math
import os
import socket
from os.path import exists

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.functional import log_softmax
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, BOS = 0, 1


def rate(step, model_size, factor, warmup):
    step = max(step, 1)
    return factor * (model_size ** (-0.5) * min(step ** (-0.5), step * warmup ** (-1.5)))


class LabelSmoothing(nn.Module):
    def __init__(self, size, padding_idx, smoothing=0.0):
        super().__init__()
        self.criterion = nn.KLDivLoss(reduction="sum")
        self.padding_idx, self.confidence, self.smoothing, self.size = padding_idx, 1.0 - smoothing, smoothing, size

    def forward(self, x, target):
        true = torch.full_like(x, self.smoothing / (self.size - 2))
        true.scatter_(1, target.unsqueeze(1), self.confidence)
        true[:, self.padding_idx] = 0
        true[target == self.padding_idx] = 0
        return self.criterion(x, true)


class SimpleLossCompute:
    def __init__(self, generator, criterion):
        self.generator, self.criterion = generator, criterion

    def __call__(self, x, y, norm):
        x = self.generator(x)
        sloss = self.criterion(x.reshape(-1, x.size(-1)), y.reshape(-1)) / norm
        return sloss.data * norm, sloss


class Copying(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = torch.randint(2, 12, (n, 8), generator=g)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        s = self.items[i]
        return s, torch.cat([torch.tensor([BOS]), s.flip(0)])


class EncoderDecoder(nn.Module):
    def __init__(self, vocab=12, d=32):
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        pe = torch.zeros(16, d)
        pos = torch.arange(16.0)[:, None] * torch.exp(torch.arange(0, d, 2) * -(math.log(10000.0) / d))
        pe[:, 0::2], pe[:, 1::2] = pos.sin(), pos.cos()
        self.register_buffer("pe", pe)
        self.core = nn.Transformer(d, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(d, vocab)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1))
        h = self.core(self.src(src) * 5.7 + self.pe[: src.size(1)], self.tgt(tgt) * 5.7 + self.pe[: tgt.size(1)], tgt_mask=mask, tgt_is_causal=True)
        return log_softmax(self.generator(h), dim=-1)


class DummyOptimizer(torch.optim.Optimizer):
    def __init__(self):
        self.param_groups = [{"lr": 0}]

    def step(self):
        None

    def zero_grad(self, set_to_none=False):
        None


class DummyScheduler:
    def step(self):
        None


def run_epoch(data_iter, model, loss_compute, optimizer, scheduler, mode="train", accum_iter=1, main=False):
    total_tokens, total_loss, n_accum = 0, 0, 0
    for i, (src, tgt) in enumerate(data_iter):
        tgt_in, tgt_y = tgt[:, :-1], tgt[:, 1:]
        ntokens = (tgt_y != PAD).sum()
        out = model(src, tgt_in)
        loss, loss_node = loss_compute(out, tgt_y, ntokens)
        if mode == "train":
            loss_node.backward()
            if i % accum_iter == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                n_accum += 1
            scheduler.step()
        total_loss += loss
        total_tokens += ntokens
        if i % 6 == 1 and mode == "train" and main:
            print("Epoch Step: %6d | Accumulation Step: %3d | Loss: %6.2f | Learning Rate: %6.1e" % (i, n_accum, loss / ntokens, optimizer.param_groups[0]["lr"]))
    return total_loss / total_tokens


def train_worker(gpu, ngpus_per_node, config):
    dist.init_process_group("gloo", init_method=config["url"], rank=gpu, world_size=ngpus_per_node)
    torch.manual_seed(0)
    model = EncoderDecoder()
    model = DDP(model)
    module = model.module
    is_main_process = gpu == 0
    criterion = LabelSmoothing(size=12, padding_idx=PAD, smoothing=0.1)
    train_set, valid_set = Copying(384, 1), Copying(64, 2)
    train_sampler = DistributedSampler(train_set)
    valid_sampler = DistributedSampler(valid_set, shuffle=False)
    train_dl = DataLoader(train_set, batch_size=config["batch_size"], shuffle=False, sampler=train_sampler)
    valid_dl = DataLoader(valid_set, batch_size=config["batch_size"], shuffle=False, sampler=valid_sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["base_lr"], betas=(0.9, 0.98), eps=1e-9)
    lr_scheduler = LambdaLR(optimizer=optimizer, lr_lambda=lambda step: rate(step, 32, factor=1, warmup=config["warmup"]))
    for epoch in range(config["num_epochs"]):
        train_sampler.set_epoch(epoch)
        model.train()
        if is_main_process:
            print(f"[GPU{gpu}] Epoch {epoch} Training ====", flush=True)
        run_epoch(train_dl, model, SimpleLossCompute(nn.Identity(), criterion), optimizer, lr_scheduler, mode="train", main=is_main_process)
        if is_main_process:
            torch.save(module.state_dict(), "%s%.2d.pt" % (config["file_prefix"], epoch))
        model.eval()
        with torch.no_grad():
            sloss = run_epoch(valid_dl, model, SimpleLossCompute(nn.Identity(), criterion), DummyOptimizer(), DummyScheduler(), mode="eval")
        dist.all_reduce(sloss)
        if is_main_process:
            print(f"validation loss {sloss.item() / ngpus_per_node:.3f}")
    if is_main_process:
        torch.save(module.state_dict(), "%sfinal.pt" % config["file_prefix"])
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    config = {"batch_size": 16, "num_epochs": 3, "base_lr": 0.3, "warmup": 30, "file_prefix": f"/tmp/copy_model_{os.getpid()}_", "url": f"tcp://localhost:{port}"}
    if not exists("%sfinal.pt" % config["file_prefix"]):
        mp.spawn(train_worker, nprocs=2, args=(2, config))
