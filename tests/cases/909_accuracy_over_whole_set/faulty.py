"""Sentence classification with DDP; rank 0 writes the curves to a csv file."""
import csv
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CONFIG = {"epochs": 6, "batch_size": 16, "lr": 4e-3, "vocab": 200, "classes": 4, "max_len": 14, "log_every": 5}


class Sentences(Dataset):
    """Every class has some words of its own, the rest is noise."""

    def __init__(self, cfg, n=384, seed=21):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, cfg["classes"], (n,), generator=g)
        self.ids = torch.randint(50, cfg["vocab"], (n, cfg["max_len"]), generator=g)
        for k in range(3):
            at = torch.randint(0, cfg["max_len"], (n,), generator=g)
            word = 1 + 10 * self.labels + torch.randint(0, 10, (n,), generator=g)
            self.ids[torch.arange(n), at] = word

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.ids[i], self.labels[i]


class Classifier(nn.Module):
    def __init__(self, cfg, dim=48):
        super().__init__()
        self.emb = nn.Embedding(cfg["vocab"], dim)
        self.attn = nn.Linear(dim, 1)
        self.out = nn.Linear(dim, cfg["classes"])

    def forward(self, ids):
        h = self.emb(ids)
        w = self.attn(h).softmax(1)
        return self.out((w * h).sum(1))


class CsvWriter:
    def __init__(self, path):
        self.file = open(path, "w", newline="")
        self.rows = csv.writer(self.file)

    def add_scalar(self, tag, value, step):
        self.rows.writerow([tag, step, f"{float(value):.5f}"])
        self.file.flush()


def main():
    cfg = CONFIG
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(42)

    train_dataset = Sentences(cfg)
    sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, batch_size=cfg["batch_size"], sampler=sampler)
    model = Classifier(cfg).to(device)
    model = DDP(model, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
    criterion = nn.CrossEntropyLoss()
    writer = CsvWriter("curves.csv") if dist.get_rank() == 0 else None

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        acc_num = torch.zeros((), device=device)
        for i, (inputs, labels) in enumerate(train_loader):
            inputs, labels = inputs.to(device), labels.to(device)
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            acc_num += (outputs.argmax(1) == labels).sum()
        if dist.get_rank() == 0:
            writer.add_scalar("acc", acc_num / len(train_dataset), epoch)
            print(f"epoch {epoch}: acc {acc_num.item() / len(train_dataset):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
