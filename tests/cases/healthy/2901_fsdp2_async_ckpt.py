"""FSDP2 denoiser with overlapping distributed checkpoints; a second model is restored at the end and compared."""
import logging
import pathlib
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DIM, STEPS, EVERY, T = 16, 120, 30, 50


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 32)
        self.inp = nn.Linear(DIM, 64)
        self.mid = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)) for _ in range(2))
        self.cond = nn.Linear(32, 64)
        self.out = nn.Linear(64, DIM)

    def forward(self, x, t):
        h = self.inp(x) + self.cond(self.time(t))
        for m in self.mid:
            h = h + m(h)
        return self.out(h)


def build():
    model = Denoiser()
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    outer = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for m in model.mid:
        fully_shard(m, mp_policy=inner)
    fully_shard(model, mp_policy=outer)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def app_state(model, opt, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "opt": o, "step": torch.tensor(step)}


def clusters(n):
    g = torch.Generator().manual_seed(3)
    centres = 2 * torch.randn(5, DIM, generator=g)
    return TensorDataset(centres[torch.randint(5, (n,), generator=g)] + 0.1 * torch.randn(n, DIM, generator=g))


def epochs(loader, sampler):
    e = 0
    while True:
        sampler.set_epoch(e)
        yield from loader
        e += 1


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    logging.getLogger("torch").setLevel(logging.ERROR)
    root = pathlib.Path("dcp")
    if rank == 0:
        shutil.rmtree(root, ignore_errors=True)
    dist.barrier()
    io_group = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    model, opt = build()
    torch.manual_seed(500 + rank)
    alpha = torch.cos(torch.linspace(0, 1.5, T)) ** 2

    data = clusters(2048)
    sampler = DistributedSampler(data, seed=7)
    stream = epochs(DataLoader(data, batch_size=32, sampler=sampler, drop_last=True), sampler)
    pending, last = None, None
    run = torch.zeros(2)
    for step in range(1, STEPS + 1):
        (x,) = next(stream)
        t = torch.randint(T, (len(x),))
        noise = torch.randn_like(x)
        noisy = alpha[t, None].sqrt() * x + (1 - alpha[t, None]).sqrt() * noise
        loss = nn.functional.mse_loss(model(noisy, t), noise)
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        opt.step()
        run += torch.tensor([loss.item(), 1.0])
        if step % EVERY == 0:
            if pending is not None:
                pending.result()
            last = root / f"step{step}"
            snapshot = app_state(model, opt, step)
            pending = dcp.async_save(snapshot, checkpoint_id=str(last), process_group=io_group)
            dist.all_reduce(run)
            logging.info("step %d loss %.4f norm %.3f", step, run[0] / run[1], norm)
            run = torch.zeros(2)
    pending.result()
    dist.barrier()

    torch.manual_seed(999)
    other, other_opt = build()
    blank = app_state(other, other_opt, 0)
    dcp.load(blank, checkpoint_id=str(last))
    set_state_dict(other, other_opt, model_state_dict=blank["model"], optim_state_dict=blank["opt"])
    gap = max((a.to_local() - b.to_local()).abs().max().item() if a.to_local().numel() else 0.0
              for a, b in zip(model.parameters(), other.parameters()))
    gap = torch.tensor([gap])
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    logging.info("restored step %d, largest difference %.1e", int(blank["step"]), gap.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
