"""Keyword spotting on synthetic spectrograms: DDP, sharded AdamW state (ZeroRedundancyOptimizer), exact test metrics."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 8
FRAMES, MELS = 40, 20


def synth_spectrograms(n, seed):
    """Each keyword is a formant track (start bin, slope) with random onset and noise."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (n,), generator=g)
    onset = torch.randint(0, 12, (n,), generator=g)
    t = torch.arange(FRAMES).float().unsqueeze(0) - onset.unsqueeze(1).float()
    start = 3.0 + 3.0 * (label % 4).float().unsqueeze(1)
    slope = torch.where(label < 4, 0.25, -0.12).unsqueeze(1)
    centre = start + slope * t
    bins = torch.arange(MELS).float().view(1, 1, -1)
    energy = torch.exp(-0.5 * (bins - centre.unsqueeze(-1)) ** 2) * ((t > 0) & (t < 24)).unsqueeze(-1)
    return TensorDataset(3 * energy + 0.7 * torch.randn(n, FRAMES, MELS, generator=g), label)


class KeywordNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.conv = nn.Conv1d(MELS, width, 5, stride=2, padding=2)
        self.norm = nn.GroupNorm(4, width)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, spec):
        x = torch.relu(self.norm(self.conv(spec.transpose(1, 2))))
        x, _ = self.gru(x.transpose(1, 2))
        return self.head(x.mean(1))


def gather_in_order(local, dataset_size):
    """Undo DistributedSampler(shuffle=False): rank r holds r, r+W, r+2W, ...; the padding at the end is cut off."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.stack(parts, dim=1).flatten(0, 1)[:dataset_size]


@torch.no_grad()
def test(model, loader):
    model.eval()
    logits, labels = [], []
    for spec, label in loader:
        logits.append(model(spec))
        labels.append(label)
    size = len(loader.dataset)
    logits = gather_in_order(torch.cat(logits), size)
    labels = gather_in_order(torch.cat(labels), size)
    model.train()
    pred = logits.argmax(1)
    f1 = []
    for c in range(CLASSES):
        tp = ((pred == c) & (labels == c)).sum().item()
        wrong = ((pred == c) ^ (labels == c)).sum().item()
        f1.append(2 * tp / max(1, 2 * tp + wrong))
    return {"n": len(labels), "loss": nn.functional.cross_entropy(logits, labels).item(),
            "accuracy": (pred == labels).float().mean().item(), "macro_f1": sum(f1) / CLASSES}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--output", default="kws")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        os.makedirs(args.output, exist_ok=True)

    torch.manual_seed(0)
    train_set = synth_spectrograms(960, seed=1)
    test_set = synth_spectrograms(251, seed=2)
    train_sampler = DistributedSampler(train_set, shuffle=True, seed=3, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, drop_last=True)
    test_loader = DataLoader(test_set, 64, sampler=DistributedSampler(test_set, shuffle=False))

    ddp = DistributedDataParallel(KeywordNet(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.AdamW,
                                        lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr,
                                                    total_steps=args.epochs * len(train_loader),
                                                    cycle_momentum=False)
    history = []
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        total = torch.zeros(())
        for spec, label in train_loader:
            loss = nn.functional.cross_entropy(ddp(spec), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.detach()
        dist.all_reduce(total)
        metrics = test(ddp.module, test_loader)
        metrics["train_loss"] = total.item() / (len(train_loader) * dist.get_world_size())
        history.append(metrics)

        optimizer.consolidate_state_dict(to=0)  # collective: the shards of the state meet on rank 0
        if rank == 0:
            print(epoch, {k: round(v, 4) for k, v in metrics.items()}, flush=True)
            target = os.path.join(args.output, "last.pt")
            torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch}, target + ".tmp")
            os.replace(target + ".tmp", target)

    if rank == 0:
        with open(os.path.join(args.output, "history.json"), "w") as f:
            json.dump(history, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
