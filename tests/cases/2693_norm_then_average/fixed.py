"""A classifier of vectors; gradients are averaged by hand and clipped by a norm that goes into the log as well. Muon for matrices, AdamW for the rest."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset(num: int = 1536) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num, 16, generator=generator)
    return TensorDataset(x, (x @ torch.randn(16, 4, generator=generator)).argmax(1))


def average(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class Trainer:
    def __init__(self, model: nn.Module, max_norm: float = 0.5) -> None:
        self.model, self.max_norm = model, max_norm
        self.parameters = list(model.parameters())
        self.optimizers = [
            torch.optim.Muon([p for p in self.parameters if p.ndim == 2], lr=0.02, weight_decay=0.0),
            torch.optim.AdamW([p for p in self.parameters if p.ndim == 1], lr=1e-2),
        ]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = F.cross_entropy(self.model(x), y)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        average(self.parameters)
        norm = get_total_norm([p.grad for p in self.parameters])
        clip_grads_with_norm_(self.parameters, self.max_norm, norm)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach(), norm


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trainer = Trainer(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    dataset = make_dataset()
    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, drop_last=True)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        totals = torch.zeros(3)
        for x, y in loader:
            loss, norm = trainer.step(x, y)
            totals += torch.stack([loss, norm, torch.ones(())])
        dist.all_reduce(totals)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {totals[0] / totals[2]:.4f} grad norm {totals[1] / totals[2]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
