"""Train, let every process predict its part of the test set, put the parts together from the run folder."""
import datetime
import glob
import os
import uuid

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = 2 * torch.rand(n, 2, generator=g) - 1
        self.y = ((self.x[:, 0] * self.x[:, 1]) > 0).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


class Run:
    def __init__(self, root="runs"):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        name = [f"{datetime.datetime.now():%Y%m%d_%H%M%S}_{uuid.uuid4().hex[:6]}"]
        dist.broadcast_object_list(name, src=0)
        self.folder = os.path.join(root, name[0])
        os.makedirs(self.folder, exist_ok=True)

    def save_part(self, part):
        torch.save(part, os.path.join(self.folder, f"part_{self.rank}.pt"))
        dist.barrier()

    def merged(self):
        parts = [torch.load(p) for p in sorted(glob.glob(os.path.join(self.folder, "part_*.pt")))]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def train(model, data, epochs=6):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _, x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def predict(net, data, run):
    ids = list(range(run.rank, len(data), run.world))
    x = torch.stack([data[i][1] for i in ids])
    return {"id": torch.tensor(ids), "prediction": net(x).argmax(1)}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    run = Run()
    model = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    train(model, Points(320, 1))

    test = Points(200, 2)
    run.save_part(predict(model.module, test, run))
    if run.rank == 0:
        out = run.merged()
        acc = (out["prediction"] == test.y[out["id"]]).float().mean().item()
        print(f"test accuracy {acc:.3f}")
        torch.save(model.module.state_dict(), os.path.join(run.folder, "weights.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
