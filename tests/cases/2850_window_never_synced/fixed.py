"""Shared trunk with one adapter per modality; modalities join the training one after another."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODALITIES = ("text", "audio", "table")
WIDTHS = {"text": 20, "audio": 32, "table": 12}


class MultiModal(nn.Module):
    def __init__(self, dim=64, classes=5):
        super().__init__()
        self.adapters = nn.ModuleDict({m: nn.Sequential(nn.Linear(WIDTHS[m], dim), nn.ReLU()) for m in MODALITIES})
        self.trunk = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
        self.classify = nn.Linear(dim, classes)

    def forward(self, x, modality):
        return self.classify(self.trunk(self.adapters[modality](x)))


class Source:
    def __init__(self, modality, rank, world, n=1800):
        g = torch.Generator().manual_seed(40 + MODALITIES.index(modality))
        x = torch.randn(n, WIDTHS[modality], generator=g)
        y = (x @ torch.randn(WIDTHS[modality], 5, generator=g)).argmax(1)
        self.train = (x[:1500][rank::world], y[:1500][rank::world])
        self.valid = (x[1500:][rank::world], y[1500:][rank::world])
        self.cursor = None
        self.generator = torch.Generator().manual_seed(900 + rank)

    def draw(self, size):
        x, y = self.train
        if self.cursor is None or len(self.cursor) < size:
            self.cursor = torch.randperm(len(x), generator=self.generator)
        rows, self.cursor = self.cursor[:size], self.cursor[size:]
        return x[rows], y[rows]


@torch.no_grad()
def validate(model, sources):
    model.eval()
    scores = {}
    for modality in MODALITIES:
        x, y = sources[modality].valid
        stat = torch.tensor([(model.module(x, modality).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
        dist.all_reduce(stat)
        scores[modality] = (stat[0] / stat[1]).item()
    model.train()
    return scores


def active_modalities(step, phase=40):
    return MODALITIES[:min(len(MODALITIES), 1 + (step - 1) // phase)]


def sync_context(model, micro, last):
    return model.no_sync() if micro < last else contextlib.nullcontext()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(70)
    sources = {m: Source(m, rank, world) for m in MODALITIES}
    model = DDP(MultiModal(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=120)

    for step in range(1, 121):
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(1)
        active = active_modalities(step)
        for micro, modality in enumerate(active):
            x, y = sources[modality].draw(24)
            with sync_context(model, micro, last=len(active) - 1):
                loss = nn.functional.cross_entropy(model(x, modality), y) / len(active)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        scheduler.step()
        if step % 40 == 0:
            dist.all_reduce(total)
            scores = validate(model, sources)
            if rank == 0:
                line = " ".join(f"{m} {s:.3f}" for m, s in scores.items())
                print(f"step {step} loss {total.item() / world:.4f} acc {line}", flush=True)

    if rank == 0:
        os.makedirs("export", exist_ok=True)
        torch.save(model.module.state_dict(), "export/multimodal.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
