"""Adapter fine-tuning; artefacts are written by the main process."""
import json
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

OUT = "adapter-out"


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def zero_only():
    """Context for work of the main process."""
    if is_main_process():
        yield True
    else:
        yield None


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


def build():
    return nn.Sequential(Lora(nn.Linear(16, 48)), nn.GELU(), Lora(nn.Linear(48, 48)), nn.GELU(), nn.Linear(48, 3))


def prompts(n=240):
    g = torch.Generator().manual_seed(2592)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, x[:, :3].argmax(1))


def save_adapter(model, epoch, history):
    with zero_only():
        os.makedirs(OUT, exist_ok=True)
        weights = {k: v for k, v in model.module.state_dict().items() if k.endswith((".a", ".b")) or k.startswith("4.")}
        torch.save(weights, os.path.join(OUT, f"adapter_{epoch}.bin"))
        with open(os.path.join(OUT, "trainer_state.json"), "w") as f:
            json.dump({"epoch": epoch, "history": history}, f)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(build())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    data = prompts()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    history = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        history.append((total[0] / total[1]).item())
        if is_main_process():
            print(f"epoch {epoch} loss {history[-1]:.4f}", flush=True)
        save_adapter(model, epoch, history)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
