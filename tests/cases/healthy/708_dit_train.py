"""DiT training after facebookresearch/DiT train.py: denoising with EMA, running loss reduced every log_every steps, rank-0 checkpoints."""
import argparse
import logging
import os
import tempfile
from collections import OrderedDict
from copy import deepcopy
from time import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9999):
    ema_params = OrderedDict(ema_model.named_parameters())
    model_params = OrderedDict(model.named_parameters())
    for name, param in model_params.items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def create_logger(logging_dir):
    if dist.get_rank() == 0:
        logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S",
                            handlers=[logging.StreamHandler(), logging.FileHandler(f"{logging_dir}/log.txt")])
        return logging.getLogger(__name__)
    logger = logging.getLogger(__name__)
    logger.addHandler(logging.NullHandler())
    return logger


class DiT(nn.Module):
    def __init__(self, dim=16, width=64, classes=5, dropout_prob=0.1):
        super().__init__()
        self.p = dropout_prob
        self.classes = classes
        self.y = nn.Embedding(classes + 1, width)
        self.t = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Linear(dim, width)
        self.mid = nn.Linear(width, width)
        self.ada = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, dim)
        nn.init.zeros_(self.ada.weight), nn.init.zeros_(self.ada.bias)
        nn.init.zeros_(self.out.weight), nn.init.zeros_(self.out.bias)

    def forward(self, x, t, y):
        if self.training and self.p > 0:
            drop = torch.rand(len(y)) < self.p
            y = torch.where(drop, self.classes, y)
        c = self.t(t[:, None].float() / 100) + self.y(y)
        shift, scale = self.ada(torch.nn.functional.silu(c)).chunk(2, 1)
        h = torch.nn.functional.silu(self.inp(x)) * (1 + scale) + shift
        return self.out(torch.nn.functional.silu(self.mid(h)))


def training_losses(model, x0, t, kwargs, abar):
    noise = torch.randn_like(x0)
    a = abar[t][:, None]
    return {"loss": (model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t, **kwargs) - noise).pow(2).mean(1)}


def main(args):
    dist.init_process_group("gloo")
    assert args.global_batch_size % dist.get_world_size() == 0
    rank = dist.get_rank()
    seed = args.global_seed * dist.get_world_size() + rank
    torch.manual_seed(seed)
    print(f"Starting rank={rank}, seed={seed}, world_size={dist.get_world_size()}.")

    experiment_dir = checkpoint_dir = None
    if rank == 0:
        experiment_dir = tempfile.mkdtemp()
        checkpoint_dir = f"{experiment_dir}/checkpoints"
        os.makedirs(checkpoint_dir, exist_ok=True)
        logger = create_logger(experiment_dir)
        logger.info(f"Experiment directory created at {experiment_dir}")
    else:
        logger = create_logger(None)

    model = DiT()
    ema = deepcopy(model)
    requires_grad(ema, False)
    model = DDP(model)
    logger.info(f"DiT Parameters: {sum(p.numel() for p in model.parameters()):,}")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)

    g = torch.Generator().manual_seed(77)
    y = torch.randint(0, 5, (512,), generator=g)
    x = torch.randn(5, 16, generator=g)[y] + 0.1 * torch.randn(512, 16, generator=g)
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=rank, shuffle=True, seed=args.global_seed)
    loader = DataLoader(dataset, batch_size=args.global_batch_size // dist.get_world_size(), shuffle=False, sampler=sampler, drop_last=True)
    abar = torch.cumprod(1 - torch.linspace(1e-3, 0.08, 100), 0)

    update_ema(ema, model.module, decay=0)  # the EMA starts as a copy of the synced weights
    model.train()
    ema.eval()

    train_steps = log_steps = 0
    running_loss = 0
    start_time = time()
    logger.info(f"Training for {args.epochs} epochs...")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        logger.info(f"Beginning epoch {epoch}...")
        for x, y in loader:
            t = torch.randint(0, 100, (x.shape[0],))
            loss = training_losses(model, x, t, dict(y=y), abar)["loss"].mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            update_ema(ema, model.module, 0.99)
            running_loss += loss.item()
            log_steps += 1
            train_steps += 1
            if train_steps % args.log_every == 0:
                steps_per_sec = log_steps / (time() - start_time)
                avg_loss = torch.tensor(running_loss / log_steps)
                dist.all_reduce(avg_loss, op=dist.ReduceOp.SUM)
                avg_loss = avg_loss.item() / dist.get_world_size()
                logger.info(f"(step={train_steps:07d}) Train Loss: {avg_loss:.4f}, Train Steps/Sec: {steps_per_sec:.2f}")
                running_loss = 0
                log_steps = 0
                start_time = time()
            if train_steps % args.ckpt_every == 0 and train_steps > 0:
                if rank == 0:
                    checkpoint = {"model": model.module.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "args": args}
                    torch.save(checkpoint, f"{checkpoint_dir}/{train_steps:07d}.pt")
                dist.barrier()
    model.eval()
    logger.info("Done!")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--global-seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--ckpt-every", type=int, default=20)
    main(parser.parse_args())
