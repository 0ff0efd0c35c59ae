# CTC recogniser after SeanNaren/deepspeech.pytorch: bucketing DistributedSampler, length-sorted bins, epoch-wise bin shuffle
import argparse
import logging
import math
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.sampler import Sampler

LETTERS = "_abcdefg "


class Spectrograms(Dataset):
    def __init__(self, n, seed):
        rng = np.random.RandomState(seed)
        self.codes = np.random.RandomState(0).randn(len(LETTERS), 12).astype(np.float32)
        self.items = []
        for _ in range(n):
            t = rng.randint(1, len(LETTERS), rng.randint(2, 7))
            frames = np.repeat(t, rng.randint(3, 5, len(t)))
            self.items.append((self.codes[frames] + 0.3 * rng.randn(len(frames), 12).astype(np.float32), t))
        self.items.sort(key=lambda s: len(s[0]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        s, t = self.items[i]
        return torch.from_numpy(s), torch.from_numpy(t.copy())


def _collate_fn(batch):
    batch = sorted(batch, key=lambda s: s[0].size(0), reverse=True)
    sizes = torch.tensor([s.size(0) for s, _ in batch])
    x = nn.utils.rnn.pad_sequence([s for s, _ in batch], batch_first=True)
    return x, torch.cat([t for _, t in batch]), sizes, torch.tensor([len(t) for _, t in batch])


class DistributedBucketingSampler(Sampler):
    def __init__(self, data_source, batch_size, num_replicas=None, rank=None):
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        ids = list(range(len(data_source)))
        self.bins = [ids[i : i + batch_size] for i in range(0, len(ids), batch_size)]
        self.num_samples = int(math.ceil(len(self.bins) / self.num_replicas))
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self):
        bins = self.bins + self.bins[: (self.total_size - len(self.bins))]
        assert len(bins) == self.total_size
        return iter(bins[self.rank :: self.num_replicas])

    def __len__(self):
        return self.num_samples

    def reset(self, epoch):
        g = torch.Generator()
        g.manual_seed(epoch)
        order = torch.randperm(len(self.bins), generator=g).tolist()
        self.bins = [self.bins[i] for i in order]


class DeepSpeech(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(12, 32, 3, padding=1), nn.Hardtanh(0, 20, inplace=True))
        self.rnn = nn.GRU(32, hidden, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, len(LETTERS), bias=False)

    def forward(self, x, lengths):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(x)[0], batch_first=True)
        return self.fc(x).transpose(0, 1), lengths


def greedy(log_probs, lengths):
    out = []
    for seq, n in zip(log_probs.argmax(-1).t().tolist(), lengths.tolist()):
        seq = seq[:n]
        out.append([c for i, c in enumerate(seq) if c != 0 and (i == 0 or c != seq[i - 1])])
    return out


def edit(a, b):
    d = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        prev, d[0] = d[0], i
        for j, y in enumerate(b, 1):
            prev, d[j] = d[j], min(d[j] + 1, d[j - 1] + 1, prev + (x != y))
    return d[-1]


def main():
    p = argparse.ArgumentParser(description="DeepSpeech training")
    p.add_argument("--epochs", default=5, type=int)
    p.add_argument("--batch-size", default=8, type=int)
    p.add_argument("--lr", default=4e-3, type=float)
    p.add_argument("--learning-anneal", default=1.1, type=float)
    p.add_argument("--max-norm", default=400, type=int)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    main_proc = rank == 0
    logging.basicConfig(level=logging.INFO if main_proc else logging.WARNING, format="%(message)s")
    torch.manual_seed(123456)
    train_set, test_set = Spectrograms(160, 1), Spectrograms(32, 2)
    sampler = DistributedBucketingSampler(train_set, args.batch_size)
    loader = DataLoader(train_set, batch_sampler=sampler, collate_fn=_collate_fn)
    model = DistributedDataParallel(DeepSpeech())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = nn.CTCLoss(zero_infinity=True)
    best_wer = None
    for epoch in range(args.epochs):
        model.train()
        sampler.reset(epoch)
        avg_loss = 0.0
        for i, (inputs, targets, input_sizes, target_sizes) in enumerate(loader):
            out, output_sizes = model(inputs, input_sizes)
            loss = criterion(out.float().log_softmax(2), targets, output_sizes, target_sizes)
            loss_value = loss.detach().clone()
            dist.all_reduce(loss_value)
            loss_value = loss_value.item() / dist.get_world_size()
            if math.isfinite(loss_value):
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
                optimizer.step()
                avg_loss += loss_value
            else:
                logging.info("Skipping grad update")
        logging.info("Training Summary Epoch: [%d] Average Loss %.3f", epoch + 1, avg_loss / len(loader))
        for g in optimizer.param_groups:
            g["lr"] = g["lr"] / args.learning_anneal
        with torch.no_grad():
            model.eval()
            errs = total = 0
            for i in range(rank, len(test_set), dist.get_world_size()):
                inputs, targets, s, _ = _collate_fn([test_set[i]])
                out, sz = model.module(inputs, s)
                errs += edit(greedy(out, sz)[0], targets.tolist())
                total += len(targets)
        counts = torch.tensor([errs, total])
        dist.all_reduce(counts)
        cer = 100.0 * counts[0].item() / counts[1].item()
        logging.info("Validation Summary Epoch: [%d] Average CER %.3f", epoch + 1, cer)
        if main_proc and (best_wer is None or best_wer > cer):
            best_wer = cer
            torch.save(model.module.state_dict(), os.path.join("/tmp", f"deepspeech_{os.getpid()}.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
