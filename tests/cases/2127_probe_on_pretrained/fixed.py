"""Two stages: contrastive pretraining of an encoder, then a linear probe on the frozen features."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OPTS = dict(classes=10, dim=96, feat=24, batch=64, pre_epochs=8, probe_epochs=6, pre_lr=2e-3, probe_lr=2e-2, tau=0.2)


def mixtures(n, seed):
    """A few informative directions hidden under strong nuisance variation."""
    fixed = torch.Generator().manual_seed(123)
    centers = 2.0 * torch.randn(OPTS["classes"], 12, generator=fixed)
    mix = torch.randn(OPTS["dim"], OPTS["dim"], generator=fixed) / OPTS["dim"] ** 0.5
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(OPTS["classes"], (n,), generator=g)
    core = centers[y] + 0.5 * torch.randn(n, 12, generator=g)
    return TensorDataset(core, 3.0 * torch.randn(n, OPTS["dim"] - 12, generator=g), y), mix


def view(core, nuisance, mix):
    shuffled = nuisance[torch.randperm(len(nuisance))]
    return torch.cat([core + 0.2 * torch.randn_like(core), shuffled], 1) @ mix


def make_encoder():
    return nn.Sequential(nn.Linear(OPTS["dim"], 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, OPTS["feat"]))


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = make_encoder()
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(OPTS["feat"], 24))

    def forward(self, a, b):
        z = F.normalize(self.projector(self.encoder(torch.cat([a, b]))), dim=1)
        sim = z @ z.t() / OPTS["tau"]
        sim.fill_diagonal_(-1e9)
        n = len(a)
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        return F.cross_entropy(sim, target)


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = make_encoder()
        self.head = nn.Linear(OPTS["feat"], OPTS["classes"])

    def forward(self, x):
        with torch.no_grad():
            h = self.encoder(x)
        return self.head(h)


def pretrain(data, mix, rank):
    model = DDP(SimCLR())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, OPTS["batch"], sampler=sampler, drop_last=True)
    opt = torch.optim.Adam(model.parameters(), lr=OPTS["pre_lr"])
    for epoch in range(OPTS["pre_epochs"]):
        sampler.set_epoch(epoch)
        for core, nuisance, _ in loader:
            loss = model(view(core, nuisance, mix), view(core, nuisance, mix))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"pretrain {epoch}: contrastive loss on rank 0 {loss.item():.3f}", flush=True)
    if rank == 0:
        torch.save({"epoch": OPTS["pre_epochs"], "state_dict": model.state_dict()}, "pretrained.pt")
    dist.barrier()


def load_encoder(model, path):
    pretrained = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    pretrained = {k.removeprefix("module."): v for k, v in pretrained.items()}
    own = model.state_dict()
    pretrained = {k: v for k, v in pretrained.items() if k in own and v.shape == own[k].shape}
    own.update(pretrained)
    model.load_state_dict(own)


def probe(train, test, mix, rank):
    model = Probe()
    load_encoder(model, "pretrained.pt")
    model.encoder.requires_grad_(False)
    model = DDP(model)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, OPTS["batch"], sampler=sampler, drop_last=True)
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=OPTS["probe_lr"])
    for epoch in range(OPTS["probe_epochs"]):
        sampler.set_epoch(100 + epoch)
        model.train()
        for core, nuisance, y in loader:
            loss = F.cross_entropy(model(view(core, nuisance, mix)), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        core, nuisance, y = (t[rank::dist.get_world_size()] for t in test.tensors)
        with torch.no_grad():
            hits = (model(torch.cat([core, nuisance], 1) @ mix).argmax(1) == y).sum().float()
        dist.all_reduce(hits)
        if rank == 0:
            print(f"probe {epoch}: loss {loss.item():.3f} test accuracy {hits.item() / len(test):.3f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(50 + rank)
    train, mix = mixtures(2560, seed=1)
    test, _ = mixtures(600, seed=2)
    pretrain(train, mix, rank)
    probe(train, test, mix, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
