import itertools
import json
import logging
import math
import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

global_step = 0
HPS = dict(seed=1234, batch_size=8, epochs=3, lr=2e-3, lr_decay=0.98, log_interval=10, eval_interval=24,
           c_mel=10.0, segment=16, fp16_run=False, model_dir="logs_tts")


class ToneDataset(Dataset):
    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.items = [(rng.randint(0, 9), rng.randint(20, 95)) for _ in range(n)]
        self.lengths = [t for _, t in self.items]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        sym, t = self.items[i]
        w = torch.sin(torch.arange(t) * (0.15 + 0.08 * sym))
        return sym, w


def collate(batch):
    lens = torch.tensor([len(w) for _, w in batch])
    y = torch.zeros(len(batch), int(lens.max()))
    for i, (_, w) in enumerate(batch):
        y[i, :len(w)] = w
    return torch.tensor([s for s, _ in batch]), y, lens


class DistributedBucketSampler(torch.utils.data.distributed.DistributedSampler):
    def __init__(self, dataset, batch_size, boundaries, num_replicas=None, rank=None, shuffle=True):
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle)
        self.lengths, self.batch_size, self.boundaries = dataset.lengths, batch_size, boundaries
        self.buckets = [[] for _ in range(len(boundaries) - 1)]
        for i, n in enumerate(self.lengths):
            for b in range(len(boundaries) - 1):
                if boundaries[b] < n <= boundaries[b + 1]:
                    self.buckets[b].append(i)
        self.buckets = [b for b in self.buckets if b]
        total_bs = self.num_replicas * batch_size
        self.num_samples_per_bucket = [len(b) + (total_bs - len(b) % total_bs) % total_bs for b in self.buckets]
        self.total_size = sum(self.num_samples_per_bucket)
        self.num_samples = self.total_size // self.num_replicas

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.epoch)
        batches = []
        for bucket, want in zip(self.buckets, self.num_samples_per_bucket):
            ids = torch.randperm(len(bucket), generator=g).tolist()
            rem = want - len(bucket)
            ids = ids + ids * (rem // len(bucket)) + ids[:rem % len(bucket)]
            ids = ids[self.rank::self.num_replicas]
            for j in range(len(ids) // self.batch_size):
                batches.append([bucket[k] for k in ids[j * self.batch_size:(j + 1) * self.batch_size]])
        order = torch.randperm(len(batches), generator=g).tolist()
        self.batches = [batches[k] for k in order]
        assert len(self.batches) * self.batch_size == self.num_samples
        return iter(self.batches)

    def __len__(self):
        return self.num_samples // self.batch_size


class Synth(nn.Module):
    def __init__(self, seg, hid=48):
        super().__init__()
        self.seg = seg
        self.emb = nn.Embedding(10, hid)
        self.register_buffer("freq", 0.15 + 0.08 * torch.arange(10))
        self.net = nn.Sequential(nn.Conv1d(hid + 20, hid, 3, padding=1), nn.LeakyReLU(0.1),
                                 nn.Conv1d(hid, hid, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv1d(hid, 1, 1))

    def decode(self, sym, pos):
        e = self.emb(sym)[:, :, None].expand(-1, -1, pos.shape[1])
        p = torch.cat([torch.sin(pos[:, None] * self.freq[:, None]), torch.cos(pos[:, None] * self.freq[:, None])], 1)
        return self.net(torch.cat([e, p], 1)).squeeze(1)

    def forward(self, sym, lens):
        ids = (torch.rand(len(sym)) * (lens - self.seg + 1)).long()
        pos = ids[:, None] + torch.arange(self.seg)
        return self.decode(sym, pos.float()), ids

    @torch.no_grad()
    def infer(self, sym, n):
        return self.decode(sym, torch.arange(n).float().expand(len(sym), -1))


class PeriodD(nn.Module):
    def __init__(self, seg):
        super().__init__()
        self.ds = nn.ModuleList([nn.Sequential(nn.Linear(seg // p, 32), nn.LeakyReLU(0.1), nn.Linear(32, 1))
                                 for p in (1, 2, 4)])

    def forward(self, y, y_hat):
        def one(x):
            return [d(x[:, ::p]) for p, d in zip((1, 2, 4), self.ds)]
        return one(y), one(y_hat)


def clip_grad_value_(params, clip_value):
    total = 0.0
    for p in params:
        if p.grad is None:
            continue
        total += p.grad.norm(2).item() ** 2
        if clip_value is not None:
            p.grad.clamp_(-clip_value, clip_value)
    return total ** 0.5


def run(rank, n_procs, hps, sync_file):
    global global_step
    torch.set_num_threads(1)
    logger = None
    if rank == 0:
        os.makedirs(hps["model_dir"], exist_ok=True)
        logging.basicConfig(level=logging.INFO, filename=os.path.join(hps["model_dir"], "train.log"))
        logger = logging.getLogger("tts")
        logger.info(json.dumps(hps))
    dist.init_process_group("gloo", init_method="file://" + sync_file, world_size=n_procs, rank=rank)
    torch.manual_seed(hps["seed"])
    train_set = ToneDataset(384, 1)
    sampler = DistributedBucketSampler(train_set, hps["batch_size"], [16, 32, 48, 64, 80, 96],
                                       num_replicas=n_procs, rank=rank)
    train_loader = DataLoader(train_set, shuffle=False, collate_fn=collate, batch_sampler=sampler)
    eval_loader = None
    if rank == 0:
        eval_loader = DataLoader(ToneDataset(64, 2), batch_size=8, shuffle=False, drop_last=False, collate_fn=collate)
    net_g, net_d = Synth(hps["segment"]), PeriodD(hps["segment"])
    optim_g = torch.optim.AdamW(net_g.parameters(), hps["lr"], betas=(0.8, 0.99), eps=1e-9)
    optim_d = torch.optim.AdamW(net_d.parameters(), hps["lr"], betas=(0.8, 0.99), eps=1e-9)
    net_g, net_d = DDP(net_g), DDP(net_d)
    torch.manual_seed(hps["seed"] + 1 + rank)
    epoch_str = 1
    sch_g = torch.optim.lr_scheduler.ExponentialLR(optim_g, gamma=hps["lr_decay"], last_epoch=epoch_str - 2)
    sch_d = torch.optim.lr_scheduler.ExponentialLR(optim_d, gamma=hps["lr_decay"], last_epoch=epoch_str - 2)
    scaler = GradScaler("cpu", enabled=hps["fp16_run"])
    for epoch in range(epoch_str, hps["epochs"] + 1):
        train_and_evaluate(rank, epoch, hps, [net_g, net_d], [optim_g, optim_d], scaler,
                           [train_loader, eval_loader], logger)
        sch_g.step()
        sch_d.step()
    dist.barrier()
    dist.destroy_process_group()


def train_and_evaluate(rank, epoch, hps, nets, optims, scaler, loaders, logger):
    net_g, net_d = nets
    optim_g, optim_d = optims
    train_loader, eval_loader = loaders
    train_loader.batch_sampler.set_epoch(epoch)
    global global_step
    net_g.train()
    net_d.train()
    for batch_idx, (sym, y, lens) in enumerate(train_loader):
        with autocast("cpu", enabled=hps["fp16_run"]):
            y_hat, ids = net_g(sym, lens)
            y = torch.stack([w[i:i + hps["segment"]] for w, i in zip(y, ids.tolist())])
            d_r, d_g = net_d(y, y_hat.detach())
            loss_disc = sum(((1 - r) ** 2).mean() + (g ** 2).mean() for r, g in zip(d_r, d_g))
        optim_d.zero_grad()
        scaler.scale(loss_disc).backward()
        scaler.unscale_(optim_d)
        norm_d = clip_grad_value_(net_d.parameters(), None)
        scaler.step(optim_d)

        d_r, d_g = net_d(y, y_hat)
        loss_mel = F.l1_loss(y_hat, y) * hps["c_mel"]
        loss_gen = sum(((1 - g) ** 2).mean() for g in d_g)
        loss_gen_all = loss_gen + loss_mel
        optim_g.zero_grad()
        scaler.scale(loss_gen_all).backward()
        scaler.unscale_(optim_g)
        norm_g = clip_grad_value_(net_g.parameters(), None)
        scaler.step(optim_g)
        scaler.update()
        if rank == 0:
            if global_step % hps["log_interval"] == 0:
                line = [x.item() for x in (loss_disc, loss_gen, loss_mel)] + [norm_g, norm_d, global_step,
                                                                              optim_g.param_groups[0]["lr"]]
                logger.info(line)
                print(epoch, [round(v, 4) for v in line], flush=True)
            if global_step % hps["eval_interval"] == 0:
                evaluate(net_g, eval_loader)
                torch.save({"model": net_g.module.state_dict(), "optimizer": optim_g.state_dict(), "iteration": epoch},
                           os.path.join(hps["model_dir"], f"G_{global_step}.pth"))
        global_step += 1


def evaluate(generator, eval_loader):
    generator.eval()
    with torch.no_grad():
        for sym, y, lens in eval_loader:
            break
        out = generator.module.infer(sym[:1], int(lens[0]))
        print("eval l1", F.l1_loss(out[0], y[0, :int(lens[0])]).item(), flush=True)
    generator.train()


def main():
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as d:
        mp.spawn(run, nprocs=2, args=(2, HPS, os.path.join(d, "init")))


if __name__ == "__main__":
    main()
