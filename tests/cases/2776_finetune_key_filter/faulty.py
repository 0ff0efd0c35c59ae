import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CKPT = "backbone.pt"
CLASSES, DIM, SIGNAL = 6, 64, 12


def make_data(n, seed):
    basis = torch.randn(SIGNAL, DIM, generator=torch.Generator().manual_seed(77))
    centre = 1.3 * torch.randn(CLASSES, SIGNAL, generator=torch.Generator().manual_seed(78))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    latent = centre[y] + 0.7 * torch.randn(n, SIGNAL, generator=g)
    x = torch.tanh(latent @ basis) + 0.5 * torch.randn(n, DIM, generator=g)
    return x, y


class Backbone(nn.Module):
    def __init__(self, out=48):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(DIM, 96), nn.Linear(96, 96), nn.Linear(96, out)

    def forward(self, x):
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.projector = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 24))

    def forward(self, a, b):
        both = torch.cat([a, b])
        return F.normalize(self.projector(self.backbone(both)), dim=1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x):
        return self.head(self.backbone(x))


def nt_xent(z, temperature=0.3):
    n = len(z) // 2
    sim = z @ z.T / temperature
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


def sharded(ds, batch, shuffle):
    sampler = DistributedSampler(ds, shuffle=shuffle, seed=4, drop_last=shuffle)
    return DataLoader(ds, batch, sampler=sampler, drop_last=shuffle), sampler


def pretrain(rank, epochs=6):
    torch.manual_seed(1)
    ddp = DDP(Contrastive())
    opt = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    loader, sampler = sharded(TensorDataset(make_data(6144, 10)[0]), 128, True)
    aug = torch.Generator().manual_seed(900 + rank)
    view = lambda x: x * (torch.rand(x.shape, generator=aug) > 0.2) + 0.2 * torch.randn(x.shape, generator=aug)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for (x,) in loader:
            loss = nt_xent(ddp(view(x), view(x)))
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"pretrain {epoch} nt-xent {total[0] / total[1]:.4f}", flush=True)
    if rank == 0:
        torch.save({"model": ddp.state_dict(), "epochs": epochs}, CKPT)
    dist.barrier()


def warm_start(model, path):
    saved = torch.load(path, map_location="cpu", weights_only=True)["model"]
    own = model.state_dict()
    usable = {k: v for k, v in saved.items() if k in own and v.shape == own[k].shape}
    own.update(usable)
    model.load_state_dict(own)
    return model


def finetune(rank, epochs=12):
    torch.manual_seed(2)
    ddp = DDP(warm_start(Classifier(), CKPT))
    slow, fast = ddp.module.backbone.parameters(), ddp.module.head.parameters()
    opt = torch.optim.AdamW([{"params": slow, "lr": 1e-4}, {"params": fast, "lr": 5e-3}])
    loader, sampler = sharded(TensorDataset(*make_data(512, 11)), 32, True)
    test_loader, _ = sharded(TensorDataset(*make_data(2048, 12)), 256, False)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
            opt.step()
    ddp.eval()
    hits = torch.zeros(2)
    with torch.no_grad():
        for x, y in test_loader:
            hits += torch.tensor([(ddp.module(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    if rank == 0:
        print(f"test accuracy {hits[0] / hits[1]:.4f}", flush=True)
        torch.save(ddp.module.state_dict(), "classifier.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pretrain(dist.get_rank())
    finetune(dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
