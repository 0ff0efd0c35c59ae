"""FSDP2 with bf16 compute, accumulation, a sharded checkpoint and a resume from it in the same job."""
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CKPT, ACCUM, EPOCHS, STOP_AFTER = Path("fsdp_ckpt"), 2, 4, 2


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, d=48, depth=3):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(24, d), nn.ModuleList(Residual(d) for _ in range(depth)), nn.Linear(d, 5)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def build(mesh):
    torch.manual_seed(31)                      # shards are cut from one and the same initialisation
    model = Tower()
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    outer = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=outer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    return model, optimizer, scheduler


class TrainState:
    """what dcp sees: model, optimizer, scheduler and the epoch to go on with"""

    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler, self.epoch = model, optimizer, scheduler, 0

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "sched": self.scheduler.state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.scheduler.load_state_dict(state["sched"])
        self.epoch = state["epoch"]


def make_data():
    g = torch.Generator().manual_seed(6)
    w = torch.randn(24, 5, generator=g)
    x = torch.randn(1280, 24, generator=g)
    y = (torch.sin(x) @ w).argmax(1)
    return TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])


def train_epoch(state, loader, sampler):
    sampler.set_epoch(state.epoch)
    state.model.train()
    meter, norms = torch.zeros(2), []
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % ACCUM == 0
        state.model.set_requires_gradient_sync(last)
        loss = F.cross_entropy(state.model(x), y)
        (loss / ACCUM).backward()
        meter += torch.tensor([loss.item(), 1.0])
        if last:
            norm = nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            norms.append(norm.full_tensor().item())                 # a collective, so on all ranks
            state.optimizer.step()
            state.optimizer.zero_grad()
    state.scheduler.step()
    state.epoch += 1
    dist.all_reduce(meter)
    return (meter[0] / meter[1]).item(), max(norms)


@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval()
    x, y = data.tensors
    per = len(y) // world                                            # 256 samples: divides evenly, one forward on each rank
    own = slice(rank * per, (rank + 1) * per)
    hit = (model(x[own]).argmax(1) == y[own]).sum().float()
    dist.all_reduce(hit)
    return hit.item() / (per * world)


def session(mesh, data, last_epoch, say):
    train, valid = data
    sampler = DistributedSampler(train, seed=2)
    loader = DataLoader(train, 16, sampler=sampler, drop_last=True)
    assert len(loader) % ACCUM == 0
    state = TrainState(*build(mesh))
    if (CKPT / ".metadata").exists():
        holder = {"app": state}
        dcp.load(holder, checkpoint_id=str(CKPT))
        say(f"resumed at epoch {state.epoch}, lr {state.scheduler.get_last_lr()[0]:.2e}")
    while state.epoch < last_epoch:
        loss, norm = train_epoch(state, loader, sampler)
        accuracy = evaluate(state.model, valid, dist.get_rank(), dist.get_world_size())
        say(f"epoch {state.epoch} loss {loss:.4f} largest norm {norm:.3f} accuracy {accuracy:.3f}")
    dcp.save({"app": state}, checkpoint_id=str(CKPT))                # all ranks: each writes its shards


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    say = (lambda m: print(m, flush=True)) if rank == 0 else (lambda m: None)
    if rank == 0:
        shutil.rmtree(CKPT, ignore_errors=True)
    dist.barrier()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = make_data()
    session(mesh, data, STOP_AFTER, say)
    session(mesh, data, EPOCHS, say)
    files = list(CKPT.glob("*.distcp"))
    say(f"{sum(f.stat().st_size for f in files) // 1024} KiB in {len(files)} shards")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
