"""Validation on rank 0 alone, with a barrier; metrics by small classes; scalars to a file that rank 0 writes."""
import json, os, tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)


class Accuracy:
    def __init__(self):
        self.reset()

    def reset(self):
        self.correct, self.total = torch.zeros(()), torch.zeros(())

    def update(self, logits, y):
        self.correct += (logits.argmax(1) == y).sum()
        self.total += len(y)

    def compute(self, sync):
        both = torch.stack([self.correct, self.total])
        if sync:
            dist.all_reduce(both)
        return (both[0] / both[1]).item()


class Writer:
    def __init__(self, folder):
        self.file = open(os.path.join(folder, "scalars.jsonl"), "w")

    def add_scalar(self, tag, value, step):
        self.file.write(json.dumps({"tag": tag, "value": value, "step": step}) + "\n")


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(2560, 16)
y = (x @ torch.randn(16, 3)).argmax(1)
train, val = TensorDataset(x[:2048], y[:2048]), TensorDataset(x[2048:], y[2048:])
sampler = DistributedSampler(train)
loader, val_loader = DataLoader(train, 32, sampler=sampler), DataLoader(val, 128)
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3)))
torch.manual_seed(1 + rank)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
train_acc, val_acc = Accuracy(), Accuracy()
writer = Writer(tempfile.mkdtemp()) if rank == 0 else None
for epoch in range(4):
    sampler.set_epoch(epoch)
    train_acc.reset()
    for xb, yb in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(xb)
        loss = nn.functional.cross_entropy(out.float(), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        train_acc.update(out.detach(), yb)
    shared = train_acc.compute(sync=True)
    if rank == 0:
        val_acc.reset()
        model.eval()
        with torch.no_grad():
            for xb, yb in val_loader:
                val_acc.update(model.module(xb), yb)
        model.train()
        writer.add_scalar("val/accuracy", val_acc.compute(sync=False), epoch)
        print(f"epoch {epoch} loss {loss.item():.4f} train {shared:.3f} val {val_acc.compute(sync=False):.3f}")
    dist.barrier()
dist.destroy_process_group()
