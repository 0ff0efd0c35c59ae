"""Two-tower text/tag matcher: functional pieces, a registry, an epoch generator, metrics in a dict, atomic checkpoints."""
import contextlib, dataclasses, functools, os, random, tempfile
from collections import defaultdict
import numpy as np
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, default_collate

REGISTRY = {}
def register(f): REGISTRY[f.__name__] = f; return f

@dataclasses.dataclass
class Cfg:
    epochs: int = 3; batch: int = 16; lr: float = 3e-3; accumulate: int = 2; seed: int = 7; width: int = 32; ema: float = 0.95

class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed); self.a = torch.randn(n, 20, generator=g)
        w = torch.randn(20, 12, generator=torch.Generator().manual_seed(1)); self.b = self.a @ w + 0.1 * torch.randn(n, 12, generator=g)
    def __len__(self): return len(self.a)
    def __getitem__(self, i): return {"a": self.a[i], "b": self.b[i], "i": i}

class Towers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(20, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 16))
        self.right = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))
    def forward(self, batch):
        return F.normalize(self.left(batch["a"]), dim=1), F.normalize(self.right(batch["b"]), dim=1), self.scale.exp().clamp(max=50)

@register
def info_nce(l, r, s):
    logits = s * l @ r.T; t = torch.arange(len(l))
    return 0.5 * (F.cross_entropy(logits, t) + F.cross_entropy(logits.T, t))

def epochs(loader, sampler, n):
    for e in range(n):
        sampler.set_epoch(e); yield e, loader

@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval(); sums = defaultdict(float)
    mine = range(rank, len(data), world)
    for at in range(0, len(mine), 32):
        b = default_collate([data[i] for i in mine[at:at + 32]])
        l, r, s = model(b); hit = ((l @ r.T).argmax(1) == torch.arange(len(l))).sum().item()
        sums["hit"] += hit; sums["n"] += len(l)
    model.train()
    t = torch.tensor([sums["hit"], sums["n"]], dtype=torch.float64); dist.all_reduce(t)
    return (t[0] / t[1]).item()

def save(path, **state):
    fd, tmp = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)))
    os.close(fd); torch.save(state, tmp); os.replace(tmp, path)

def main(cfg):
    dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(cfg.seed + rank); np.random.seed(cfg.seed + rank); torch.manual_seed(cfg.seed)
    net = Towers(cfg.width); model = DistributedDataParallel(net); torch.manual_seed(cfg.seed * 1000 + rank)
    decay = [p for p in net.parameters() if p.dim() > 1]; rest = [p for p in net.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=cfg.lr)
    train, test = Pairs(512, 3), Pairs(101, 4)
    sampler = DistributedSampler(train, seed=cfg.seed); loader = DataLoader(train, batch_sampler=BatchSampler(sampler, cfg.batch, True))
    per_epoch = len(loader) // cfg.accumulate
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg.lr, total_steps=per_epoch * cfg.epochs)
    average = {k: v.detach().clone() for k, v in net.state_dict().items()}; loss_fn = REGISTRY["info_nce"]; best = -1.0
    for epoch, batches in epochs(loader, sampler, cfg.epochs):
        shown = torch.zeros(2)
        for i, b in enumerate(batches):
            last = (i + 1) % cfg.accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                l, r, s = model({**b, "a": b["a"] + 0.02 * torch.randn_like(b["a"])})
                loss = loss_fn(l, r, s); (loss / cfg.accumulate).backward()
            shown += torch.tensor([loss.item(), 1.0])
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 5.0); opt.step(); sched.step(); opt.zero_grad(set_to_none=True)
                with torch.no_grad():
                    for k, v in net.state_dict().items(): average[k].lerp_(v, 1 - cfg.ema)
        dist.all_reduce(shown); acc = evaluate(net, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {shown[0] / shown[1]:.4f} acc {acc:.3f}", flush=True)
            if acc > best: save("best.pt", model=net.state_dict(), opt=opt.state_dict(), sched=sched.state_dict(), epoch=epoch, ema=average)
        best = max(best, acc); dist.barrier()
    state = torch.load("best.pt", map_location="cpu", weights_only=True); net.load_state_dict(state["model"])
    final = evaluate(net, test, rank, world)
    if rank == 0: print(f"best {final:.3f}")
    dist.destroy_process_group()

if __name__ == "__main__":
    main(Cfg())
