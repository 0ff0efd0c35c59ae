"""Audio event tagging with random time/frequency masking; job is preempted once and resumes."""
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CKPT_DIR = "audio_ckpt"
TAGS, T, M = 6, 48, 24


def synth(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = (torch.rand(n, TAGS, generator=g) < 0.35).float()
    base = torch.zeros(TAGS, T, M)
    for k in range(TAGS):
        base[k, :, 4 * k:4 * k + 2] = torch.sin(torch.arange(T).float() * (0.2 + 0.15 * k))[:, None].abs()
    onset = torch.randint(0, T // 2, (n,), generator=g)
    x = torch.einsum("nk,ktm->ntm", labels, base)
    x = torch.stack([torch.roll(a, int(o), 0) for a, o in zip(x, onset)])
    return TensorDataset(x + 1.2 * torch.randn(n, T, M, generator=g), labels)


def spec_augment(x, max_t=10, max_f=6):
    """One time and one frequency mask per clip, and a random gain."""
    b, t, m = x.shape
    tw = torch.randint(0, max_t, (b, 1)), torch.randint(0, t - max_t, (b, 1))
    fw = torch.randint(0, max_f, (b, 1)), torch.randint(0, m - max_f, (b, 1))
    ts, fs = torch.arange(t)[None], torch.arange(m)[None]
    tmask = (ts >= tw[1]) & (ts < tw[1] + tw[0])
    fmask = (fs >= fw[1]) & (fs < fw[1] + fw[0])
    gain = torch.empty(b, 1, 1).uniform_(0.7, 1.3)
    return (gain * x).masked_fill(tmask[:, :, None] | fmask[:, None, :], 0.0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(M, 48, 5, padding=2), nn.ReLU(),
                                  nn.Conv1d(48, 48, 5, stride=2, padding=2), nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(48, TAGS)

    def forward(self, x):
        return self.fc(self.drop(self.conv(x.transpose(1, 2)).amax(2)))


class Job:
    def __init__(self, seed=5, batch=32, lr=2e-3):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed + 1000 * self.rank)
        train, val = synth(1536, 1), synth(256, 2)
        self.sampler = DistributedSampler(train, seed=seed)
        self.loader = DataLoader(train, batch, sampler=self.sampler, drop_last=True)
        self.val_x = val.tensors[0][self.rank::self.world]
        self.val_y = val.tensors[1][self.rank::self.world]
        self.model = DistributedDataParallel(Tagger())
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 4, 0.5)
        self.epoch = 0

    def save(self):
        state = {
            "epoch": self.epoch,
            "model": self.model.module.state_dict(),
            "opt": self.opt.state_dict(),
            "sched": self.sched.state_dict(),
        }
        torch.save(torch.get_rng_state(), f"{CKPT_DIR}/rng_rank{self.rank}.pt")
        if self.rank == 0:
            torch.save(state, f"{CKPT_DIR}/last.tmp")
            os.replace(f"{CKPT_DIR}/last.tmp", f"{CKPT_DIR}/last.pt")
        dist.barrier()

    def maybe_resume(self):
        if not os.path.exists(f"{CKPT_DIR}/last.pt"):
            return
        state = torch.load(f"{CKPT_DIR}/last.pt", map_location="cpu")
        self.model.module.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.epoch = state["epoch"]
        torch.set_rng_state(torch.load(f"{CKPT_DIR}/rng_rank{self.rank}.pt"))
        if self.rank == 0:
            print(f"resumed at epoch {self.epoch}", flush=True)

    @torch.no_grad()
    def f1(self):
        self.model.eval()
        hit = self.model.module(self.val_x) > 0
        pos = self.val_y > 0
        c = torch.tensor([(hit & pos).sum().item(), hit.sum().item() + pos.sum().item()], dtype=torch.float64)
        dist.all_reduce(c)
        self.model.train()
        return (2 * c[0] / c[1]).item()

    def train_until(self, last_epoch):
        while self.epoch < last_epoch:
            self.sampler.set_epoch(self.epoch)
            tot = torch.zeros(2)
            for x, y in self.loader:
                loss = F.binary_cross_entropy_with_logits(self.model(spec_augment(x)), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                tot += torch.tensor([loss.item(), 1.0])
            self.sched.step()
            self.epoch += 1
            dist.all_reduce(tot)
            f1 = self.f1()
            if self.rank == 0:
                print(f"epoch {self.epoch} loss {tot[0] / tot[1]:.4f} f1 {f1:.3f}", flush=True)
            self.save()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        shutil.rmtree(CKPT_DIR, ignore_errors=True)
        os.makedirs(CKPT_DIR)
    dist.barrier()
    # first allocation of the queue ends after 4 epochs, the second one takes over
    for budget in (4, 10):
        job = Job()
        job.maybe_resume()
        job.train_until(budget)
        del job
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
