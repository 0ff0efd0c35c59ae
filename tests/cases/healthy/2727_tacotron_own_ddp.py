import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Variable
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def flatten(tensors):
    return torch.cat([t.contiguous().view(-1) for t in tensors], dim=0)


def unflatten(flat, tensors):
    outs, offset = [], 0
    for t in tensors:
        outs.append(flat.narrow(0, offset, t.numel()).view_as(t))
        offset += t.numel()
    return outs


class GradReducer(nn.Module):
    """Data parallel wrapper: weights come from process 0, gradients are averaged once backward has ended."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.needs_reduction = False
        for p in self.module.state_dict().values():
            if torch.is_tensor(p):
                dist.broadcast(p, 0)

        def allreduce_params():
            if not self.needs_reduction:
                return
            self.needs_reduction = False
            buckets = {}
            for p in self.module.parameters():
                if p.requires_grad and p.grad is not None:
                    buckets.setdefault(p.dtype, []).append(p)
            for bucket in buckets.values():
                grads = [p.grad.data for p in bucket]
                flat = flatten(grads)
                dist.all_reduce(flat)
                flat /= dist.get_world_size()
                for buf, synced in zip(grads, unflatten(flat, grads)):
                    buf.copy_(synced)

        for p in list(self.module.parameters()):
            def hook(*unused):
                Variable._execution_engine.queue_callback(allreduce_params)
            if p.requires_grad:
                p.register_hook(hook)

    def forward(self, *inputs):
        self.needs_reduction = True
        return self.module(*inputs)


class Speech(Dataset):
    def __init__(self, n, seed, n_mel=16):
        g = torch.Generator().manual_seed(77)
        table = torch.randn(20, n_mel, generator=g)
        g.manual_seed(seed)
        self.items = []
        for _ in range(n):
            t = int(torch.randint(4, 12, (1,), generator=g))
            text = torch.randint(0, 20, (t,), generator=g)
            mel = table[text].repeat_interleave(2, 0)
            self.items.append((text, mel + 0.05 * torch.randn(mel.shape, generator=g)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    lens, order = torch.sort(torch.tensor([len(t) for t, _ in batch]), descending=True)
    text = torch.zeros(len(batch), int(lens[0]), dtype=torch.long)
    mel = torch.zeros(len(batch), 2 * int(lens[0]), 16)
    gate = torch.zeros(len(batch), 2 * int(lens[0]))
    for i, j in enumerate(order.tolist()):
        t, m = batch[j]
        text[i, :len(t)] = t
        mel[i, :len(m)] = m
        gate[i, len(m) - 1:] = 1
    return text, lens, mel, gate


class Tacotron(nn.Module):
    def __init__(self, n_mel=16, hid=64):
        super().__init__()
        self.embedding = nn.Embedding(20, hid)
        self.conv = nn.Sequential(nn.Conv1d(hid, hid, 3, padding=1), nn.GroupNorm(8, hid), nn.ReLU())
        self.encoder = nn.LSTM(hid, hid // 2, batch_first=True, bidirectional=True)
        self.prenet = nn.Linear(n_mel, 32)
        self.decoder = nn.LSTM(hid + 32, hid, batch_first=True)
        self.mel_out = nn.Linear(hid, n_mel)
        self.gate_out = nn.Linear(hid, 1)

    def forward(self, text, lens, mel):
        x = self.conv(self.embedding(text).transpose(1, 2)).transpose(1, 2)
        x = nn.utils.rnn.pack_padded_sequence(x, lens, batch_first=True)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.encoder(x)[0], batch_first=True)
        memory = x.repeat_interleave(2, 1)
        prev = torch.cat([torch.zeros_like(mel[:, :1]), mel[:, :-1]], 1)
        # the prenet keeps its dropout while decoding too
        prev = F.dropout(F.relu(self.prenet(prev)), 0.5, training=True)
        h, _ = self.decoder(torch.cat([memory, prev], 2))
        return self.mel_out(h), self.gate_out(h).squeeze(-1)


def criterion(out, mel, gate):
    return F.mse_loss(out[0], mel) + F.binary_cross_entropy_with_logits(out[1], gate)


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= n
    return rt


def validate(model, valset, iteration, batch_size, n, rank):
    model.eval()
    with torch.no_grad():
        loader = DataLoader(valset, sampler=DistributedSampler(valset, shuffle=False), batch_size=batch_size,
                            collate_fn=collate, drop_last=False)
        val = 0.0
        for i, (text, lens, mel, gate) in enumerate(loader):
            val += reduce_tensor(criterion(model(text, lens, mel), mel, gate), n).item()
        val = val / (i + 1)
    model.train()
    if rank == 0:
        print("Validation loss {}: {:9f}".format(iteration, val), flush=True)


def train(hp):
    dist.init_process_group("gloo", init_method="env://")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(hp.seed + rank)
    model = GradReducer(Tacotron())
    opt = torch.optim.Adam(model.parameters(), lr=hp.lr, weight_decay=1e-6)
    trainset, valset = Speech(512, 1), Speech(64, 2)
    sampler = DistributedSampler(trainset)
    loader = DataLoader(trainset, sampler=sampler, batch_size=hp.batch_size, drop_last=True, collate_fn=collate)
    if rank == 0:
        os.makedirs(hp.out, exist_ok=True)
    iteration = 0
    model.train()
    for epoch in range(hp.epochs):
        sampler.set_epoch(epoch)
        for text, lens, mel, gate in loader:
            for g in opt.param_groups:
                g["lr"] = hp.lr
            model.zero_grad()
            loss = criterion(model(text, lens, mel), mel, gate)
            reduced = reduce_tensor(loss.data, n).item()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if rank == 0 and iteration % 8 == 0 and not math.isnan(reduced):
                print("Train loss {} {:.6f} Grad Norm {:.6f}".format(iteration, reduced, grad_norm), flush=True)
            if iteration % 32 == 0:
                validate(model, valset, iteration, hp.batch_size, n, rank)
                if rank == 0:
                    torch.save({"iteration": iteration, "state_dict": model.state_dict(),
                                "optimizer": opt.state_dict(), "learning_rate": hp.lr},
                               os.path.join(hp.out, f"checkpoint_{iteration}"))
            iteration += 1
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=1234)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--out", default="outdir")
    train(ap.parse_args())
