"""Cluster training script (SLURM)."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


class Cluster:
    """rank, world and rendezvous of this task"""

    def __init__(self):
        env = os.environ
        self.rank = int(env.get("SLURM_PROCID", 0))
        self.world = int(env.get("SLURM_NTASKS", 1))
        self.tmp = None

    @property
    def is_main(self):
        return self.rank == 0

    def connect(self):
        if self.world == 1:
            self.tmp = tempfile.TemporaryDirectory()
            url = f"file://{self.tmp.name}/rendezvous"
        else:
            url = "tcp://{}:{}".format(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        dist.init_process_group("gloo", init_method=url, rank=self.rank, world_size=self.world)

    def close(self):
        dist.destroy_process_group()
        if self.tmp:
            self.tmp.cleanup()


def shard(dataset, cluster, epoch):
    g = torch.Generator().manual_seed(epoch)
    order = torch.randperm(len(dataset), generator=g)
    return Subset(dataset, order[cluster.rank :: cluster.world].tolist())


def train(cluster):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.rand(600, 6, generator=torch.Generator().manual_seed(1)) * 4 - 2
    data = TensorDataset(x, (x[:, :2].prod(1) + x[:, 2].sin() - x[:, 3:].abs().sum(1) / 3).unsqueeze(1))
    for epoch in range(3):
        meter = torch.zeros(2)
        for xb, yb in DataLoader(shard(data, cluster, epoch), batch_size=20):
            loss = nn.functional.l1_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter += torch.tensor([loss.item() * len(xb), len(xb)])
        dist.all_reduce(meter)
        if cluster.is_main:
            print(f"epoch {epoch} samples {int(meter[1])} l1 {(meter[0] / meter[1]).item():.4f}", flush=True)


if __name__ == "__main__":
    cluster = Cluster()
    cluster.connect()
    train(cluster)
    cluster.close()
