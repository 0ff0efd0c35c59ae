"""Plankton classifier: every process reads its own files and builds the label map from them."""
import collections
import os
import pathlib
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

SPECIES = ["acantharia", "copepod", "diatom", "echinoderm", "fecal_pellet", "trichodesmium"]


def write_files(root, files=8, rows=60):
    rng = np.random.default_rng(2)
    for f in range(files):
        # the last species was only met on the second half of the cruise's odd stations
        known = len(SPECIES) if f % 2 else len(SPECIES) - 1
        label = rng.integers(0, known, rows)
        feats = rng.normal(size=(rows, 10)) + np.eye(10)[label] * 2.5
        names = np.array(SPECIES)[label]
        np.savez(root / f"station_{f:02d}.npz", feats=feats.astype("float32"), names=names)


class Stations(Dataset):
    def __init__(self, paths):
        self.feats, self.names = [], []
        for p in paths:
            with np.load(p) as z:
                self.feats.append(z["feats"])
                self.names += z["names"].tolist()
        self.feats = np.concatenate(self.feats)

    @property
    def label_map(self):
        counts = collections.Counter(self.names)
        return {name: i for i, name in enumerate(sorted(counts))}

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        return self.feats[i], self.names[i]


class Collate:
    def __init__(self, label_map):
        self.label_map = label_map

    def __call__(self, batch):
        x = torch.from_numpy(np.stack([b[0] for b in batch]))
        return x, torch.tensor([self.label_map[b[1]] for b in batch])


def run():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as tmp:
        root = pathlib.Path(tmp)
        write_files(root)
        paths = sorted(root.glob("*.npz"))
        data = Stations(paths[rank::world])
        label_map = data.label_map
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, len(label_map))))
    loader = DataLoader(data, batch_size=20, shuffle=True, drop_last=True, collate_fn=Collate(label_map),
                        generator=torch.Generator().manual_seed(rank))
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    for epoch in range(4):
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: {len(label_map)} classes, loss {mean.item() / world:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
