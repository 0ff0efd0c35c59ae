"""CTC recogniser over utterances of differing length with a bucketing distributed sampler."""
import json
import logging
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

HPS = {"train": {"seed": 1234, "epochs": 5, "learning_rate": 4e-3, "lr_decay": 0.9, "batch_size": 16, "log_interval": 8},
       "data": {"n_mels": 12, "vocab": 8, "boundaries": [8, 20, 28, 36, 48]}, "model_dir": "logs/ctc"}


class Utterances(Dataset):
    def __init__(self, n, seed, hp):
        g = torch.Generator().manual_seed(seed)
        table = torch.randn(hp["vocab"], hp["n_mels"], generator=torch.Generator().manual_seed(4))
        self.items, self.lengths = [], []
        for _ in range(n):
            text = torch.randint(1, hp["vocab"], (int(torch.randint(3, 10, (1,), generator=g)),), generator=g)
            frames = text.repeat_interleave(torch.randint(3, 6, (len(text),), generator=g))
            spec = table[frames] + 0.4 * torch.randn(len(frames), hp["n_mels"], generator=g)
            self.items.append((spec, text))
            self.lengths.append(len(frames))

    def __getitem__(self, i):
        return self.items[i]

    def __len__(self):
        return len(self.items)


def collate(batch):
    specs, texts = zip(*batch)
    return (pad_sequence(specs, batch_first=True), torch.tensor([len(s) for s in specs]), torch.cat(texts),
            torch.tensor([len(t) for t in texts]))


class DistributedBucketSampler(DistributedSampler):
    """Keeps similar lengths in a batch; each bucket is filled up so that all ranks get the same number of batches."""

    def __init__(self, dataset, batch_size, boundaries, num_replicas=None, rank=None, shuffle=True):
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle)
        self.batch_size = batch_size
        self.buckets = [[i for i, l in enumerate(dataset.lengths) if lo < l <= hi]
                        for lo, hi in zip(boundaries, boundaries[1:])]
        self.buckets = [b for b in self.buckets if b]
        unit = self.num_replicas * batch_size
        self.num_samples_per_bucket = [math.ceil(len(b) / unit) * unit for b in self.buckets]
        self.total_size = sum(self.num_samples_per_bucket)
        self.num_samples = self.total_size // self.num_replicas

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.epoch)
        batches = []
        for bucket, size in zip(self.buckets, self.num_samples_per_bucket):
            ids = torch.randperm(len(bucket), generator=g).tolist() if self.shuffle else list(range(len(bucket)))
            rem = size - len(bucket)
            ids = ids + ids * (rem // len(bucket)) + ids[: rem % len(bucket)]
            ids = ids[self.rank::self.num_replicas]
            for j in range(len(ids) // self.batch_size):
                batches.append([bucket[k] for k in ids[j * self.batch_size:(j + 1) * self.batch_size]])
        if self.shuffle:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=g).tolist()]
        return iter(batches)

    def __len__(self):
        return self.num_samples // self.batch_size


class Recogniser(nn.Module):
    def __init__(self, n_mels, vocab, d=48):
        super().__init__()
        self.front = nn.Conv1d(n_mels, d, 3, padding=1)
        self.rnn = nn.GRU(d, d // 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, spec, lengths):
        h = F.relu(self.front(spec.transpose(1, 2))).transpose(1, 2)
        packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=spec.size(1))
        return F.log_softmax(self.out(h), -1)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
    return row[-1]


@torch.no_grad()
def evaluate(model, dataset, rank, world, batch=20):
    model.eval()
    errors = torch.zeros(2, dtype=torch.float64)
    mine = list(range(rank, len(dataset), world))
    for i in range(0, len(mine), batch):
        spec, slen, text, tlen = collate([dataset[k] for k in mine[i:i + batch]])
        best = model(spec, slen).argmax(-1)
        for path, n, ref in zip(best, slen.tolist(), text.split(tlen.tolist())):
            hyp = [c for c in torch.unique_consecutive(path[:n]).tolist() if c != 0]
            errors += torch.tensor([float(edit_distance(hyp, ref.tolist())), float(len(ref))])
    dist.all_reduce(errors)
    model.train()
    return (errors[0] / errors[1]).item()


def get_logger(path):
    logger = logging.getLogger("ctc")
    logger.setLevel(logging.INFO)
    os.makedirs(path, exist_ok=True)
    for h in (logging.StreamHandler(sys.stdout), logging.FileHandler(os.path.join(path, "train.log"))):
        logger.addHandler(h)
    return logger


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    hps, tr = HPS, HPS["train"]
    logger = get_logger(hps["model_dir"]) if rank == 0 else None
    if logger:
        logger.info(json.dumps(hps))
    torch.manual_seed(tr["seed"])
    train_set, dev_set = Utterances(640, 1, hps["data"]), Utterances(101, 2, hps["data"])
    sampler = DistributedBucketSampler(train_set, tr["batch_size"], hps["data"]["boundaries"], num_replicas=world,
                                       rank=rank, shuffle=True)
    loader = DataLoader(train_set, num_workers=0, shuffle=False, collate_fn=collate, batch_sampler=sampler)
    net = Recogniser(hps["data"]["n_mels"], hps["data"]["vocab"])
    net = DDP(net)
    optimizer = torch.optim.AdamW(net.parameters(), tr["learning_rate"], betas=(0.8, 0.99), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=tr["lr_decay"])

    global_step = 0
    for epoch in range(1, tr["epochs"] + 1):
        loader.batch_sampler.set_epoch(epoch)
        for spec, slen, text, tlen in loader:
            logp = net(spec, slen)
            loss = F.ctc_loss(logp.transpose(0, 1), text, slen, tlen, blank=0, reduction="mean", zero_infinity=True)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            if global_step % tr["log_interval"] == 0:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                if logger:
                    logger.info(f"step {global_step} loss {shown.item() / world:.4f} grad_norm {grad_norm:.3f} "
                                f"frames {spec.size(1)}")
            global_step += 1
        cer = evaluate(net.module, dev_set, rank, world)
        if logger:
            logger.info(f"====> Epoch: {epoch} dev token error rate {cer:.3f}")
            torch.save({"model": net.module.state_dict(), "iteration": epoch, "optimizer": optimizer.state_dict(),
                        "learning_rate": optimizer.param_groups[0]["lr"]},
                       os.path.join(hps["model_dir"], f"G_{global_step}.pth"))
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
