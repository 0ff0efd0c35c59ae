"""Stage 1 (pretraining of an autoencoder) and stage 2 (classifier on the frozen encoder) each make and destroy a process group of their own,
with a FileStore that rank 0 names through the launcher's directory."""
import os, tempfile, datetime
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RUN = os.path.join(tempfile.gettempdir(), f"stages767_{os.environ['MASTER_PORT']}")


def group(stage):
    os.makedirs(RUN, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{RUN}/rdzv_{stage}", rank=RANK, world_size=WORLD, timeout=datetime.timedelta(seconds=120))


def dataset():
    g = torch.Generator().manual_seed(0)
    basis = torch.randn(4, 20, generator=g)
    y = torch.randint(0, 4, (320,), generator=g)
    return TensorDataset(basis[y] + 0.5 * torch.randn(320, 20, generator=g), y)


def loop(model, ds, lossfn, epochs, lr, tag):
    smp = DistributedSampler(ds)
    dl = DataLoader(ds, 16, sampler=smp)
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    for e in range(epochs):
        smp.set_epoch(e)
        model.train()
        agg = torch.zeros(2)
        for b in dl:
            l = lossfn(model, *b)
            opt.zero_grad(); l.backward(); opt.step()
            agg += torch.tensor([l.item() * len(b[0]), len(b[0])])
        dist.all_reduce(agg)
        if RANK == 0:
            print(f"{tag} {e}: {agg[0] / agg[1]:.4f}")


class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 6))
        self.dec = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 20))

    def forward(self, x):
        return self.dec(self.enc(x))


class Probe(nn.Module):
    def __init__(self, enc):
        super().__init__()
        self.enc = enc.eval().requires_grad_(False)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        with torch.no_grad():
            z = self.enc(x)
        return self.fc(z)


if __name__ == "__main__":
    ds = dataset()
    group("pretrain")
    torch.manual_seed(1)
    ae = DDP(AE())
    loop(ae, ds, lambda m, x, y: F.mse_loss(m(x), x), 3, 5e-3, "recon")
    encoder = ae.module.enc
    dist.destroy_process_group()

    group("probe")
    torch.manual_seed(2)
    probe = DDP(Probe(encoder))
    loop(probe, ds, lambda m, x, y: F.cross_entropy(m(x), y), 3, 2e-2, "probe")
    dist.barrier()
    dist.destroy_process_group()
