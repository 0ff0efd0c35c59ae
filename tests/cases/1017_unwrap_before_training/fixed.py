"""HydraGNN-style multi-head regression: run_training(config) builds, wraps and trains."""
import json

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CONFIG = json.loads("""
{"Architecture": {"hidden": 40, "heads": {"energy": 1, "forces": 3}},
 "Training": {"num_epoch": 4, "batch_size": 16, "learning_rate": 0.004}}
""")


class MultiHead(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.loss_weights = {"energy": 1.0, "forces": 0.5}
        self.shared = nn.Sequential(nn.Linear(9, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.heads = nn.ModuleDict({name: nn.Linear(hidden, dim) for name, dim in heads.items()})

    def forward(self, x):
        h = self.shared(x)
        return {name: head(h) for name, head in self.heads.items()}


def get_distributed_model(model):
    if dist.is_initialized() and dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    return model


def unwrap(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def dataset(n=288):
    g = torch.Generator().manual_seed(136)
    x = torch.randn(n, 9, generator=g)
    energy = x.pow(2).sum(1, keepdim=True) / 9
    return TensorDataset(x, energy, 2 * x[:, :3] / 9)


def multihead_loss(weights, out, energy, forces):
    return weights["energy"] * nn.functional.mse_loss(out["energy"], energy) + weights["forces"] * nn.functional.mse_loss(
        out["forces"], forces
    )


def train(loader, model, weights, opt):
    total = torch.zeros(2)
    for x, energy, forces in loader:
        opt.zero_grad()
        loss = multihead_loss(weights, model(x), energy, forces)
        loss.backward()
        opt.step()
        total += torch.tensor([loss.item() * len(x), len(x)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def train_validate(model, loader, config):
    # loss weights live in the network, not in the wrapper
    weights = unwrap(model).loss_weights
    opt = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
    for epoch in range(config["num_epoch"]):
        loader.sampler.set_epoch(epoch)
        model.train()
        error = train(loader, model, weights, opt)
        if dist.get_rank() == 0:
            print(f"Epoch: {epoch:02d}, Train Loss: {error:.6f}", flush=True)


def run_training(config):
    torch.manual_seed(0)
    model = get_distributed_model(MultiHead(config["Architecture"]["hidden"], config["Architecture"]["heads"]))
    data = dataset()
    loader = DataLoader(data, config["Training"]["batch_size"], sampler=DistributedSampler(data))
    train_validate(model, loader, config["Training"])
    if dist.get_rank() == 0:
        torch.save(unwrap(model).state_dict(), "hydra.pk")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_training(CONFIG)
    dist.barrier()
    dist.destroy_process_group()
