import copy
import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

CONFIG = {
    "model": {"hidden": 48, "dropout": 0.0},
    "optim": {"name": "adam", "lr": 5e-3},
    "train": {"epochs": 4, "batch_size": 20, "seed": 55},
}

OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": partial(torch.optim.SGD, momentum=0.9)}


def build_model(cfg):
    return nn.Sequential(nn.Linear(9, cfg["hidden"]), nn.ReLU(), nn.Dropout(cfg["dropout"]), nn.Linear(cfg["hidden"], 3))


def build_optimizer(cfg, params):
    return OPTIMIZERS[cfg["name"]](params, lr=cfg["lr"])


class Dataset(torch.utils.data.Dataset):
    """which third of the vector is the largest?"""

    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.x = torch.rand(n, 9, generator=g)
        self.y = self.x.view(n, 3, 3).sum(2).argmax(1)

    def __getitem__(self, i):
        return self.x[i], self.y[i]

    def __len__(self):
        return len(self.x)


class Experiment:
    def __init__(self, cfg):
        self.cfg = cfg
        torch.manual_seed(cfg["train"]["seed"])
        template = build_model(cfg["model"])
        self.initial = {k: v.clone() for k, v in template.state_dict().items()}
        net = copy.deepcopy(template)  # the template is kept for later resets
        optimizer = build_optimizer(cfg["optim"], template.parameters())
        self.template, self.optimizer = template, optimizer
        self.model = DDP(net)

    def run(self, dataset):
        t = self.cfg["train"]
        sampler = DistributedSampler(dataset, seed=t["seed"])
        loader = DataLoader(dataset, t["batch_size"], sampler=sampler)
        for epoch in range(t["epochs"]):
            sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for x, y in loader:
                self.optimizer.zero_grad()
                self.model.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                total += torch.tensor([loss.item(), 1.0])
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {(total[0] / total[1]).item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size()
    Experiment(CONFIG).run(Dataset(400))
    dist.destroy_process_group()
