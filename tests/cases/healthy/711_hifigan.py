"""Vocoder GAN after jik876/hifi-gan train.py: mp.spawn, two discriminators behind one optimizer, validation by rank 0 alone."""
import argparse
import itertools
import os
import random
import socket
import tempfile
import time

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class AttrDict(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class MelDataset(Dataset):
    def __init__(self, n, segment, seed):
        g = torch.Generator().manual_seed(seed)
        f = 0.02 + 0.1 * torch.rand(n, 1, generator=g)
        self.wav = torch.sin(6.2832 * f * torch.arange(256.0)) + 0.05 * torch.randn(n, 256, generator=g)
        self.segment = segment

    def __len__(self):
        return len(self.wav)

    def __getitem__(self, i):
        start = random.randint(0, 256 - self.segment) if self.segment < 256 else 0
        y = self.wav[i, start : start + self.segment]
        return mel_spectrogram(y.unsqueeze(0)).squeeze(0), y


def mel_spectrogram(y):
    w = torch.hann_window(16)
    return torch.log(torch.stft(y, 16, 8, 16, window=w, center=False, return_complex=True).abs() + 1e-5)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.utils.parametrizations.weight_norm(nn.Conv1d(9, 32, 3, padding=1))
        self.up = nn.ConvTranspose1d(32, 16, 16, 8, 0)
        self.post = nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 1, 7, padding=3))

    def forward(self, x):
        return torch.tanh(self.post(F.leaky_relu(self.up(F.leaky_relu(self.pre(x), 0.1)), 0.1)))


class Disc(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool
        self.convs = nn.ModuleList([nn.Conv1d(1, 16, 5, 2, 2), nn.Conv1d(16, 16, 5, 2, 2)])
        self.post = nn.Conv1d(16, 1, 3, padding=1)

    def one(self, x):
        fmap = []
        x = F.avg_pool1d(x, self.pool) if self.pool > 1 else x
        for c in self.convs:
            x = F.leaky_relu(c(x), 0.1)
            fmap.append(x)
        return self.post(x).flatten(1), fmap

    def forward(self, y, y_hat):
        (r, fr), (g, fg) = self.one(y), self.one(y_hat)
        return r, g, fr, fg


def feature_loss(fr, fg):
    return 2 * sum((a - b).abs().mean() for a, b in zip(fr, fg))


def train(rank, a, h):
    init_process_group(backend="gloo", init_method=h.dist_url, world_size=a.num_gpus, rank=rank)
    torch.manual_seed(h.seed)
    random.seed(h.seed + rank)
    generator, mpd, msd = Generator(), Disc(1), Disc(2)
    if rank == 0:
        os.makedirs(a.checkpoint_path, exist_ok=True)
        print("checkpoints directory : ", a.checkpoint_path)
    steps, last_epoch = 0, -1
    generator = DistributedDataParallel(generator)
    mpd = DistributedDataParallel(mpd)
    msd = DistributedDataParallel(msd)
    optim_g = torch.optim.AdamW(generator.parameters(), h.learning_rate, betas=(0.8, 0.99))
    optim_d = torch.optim.AdamW(itertools.chain(msd.parameters(), mpd.parameters()), h.learning_rate, betas=(0.8, 0.99))
    scheduler_g = torch.optim.lr_scheduler.ExponentialLR(optim_g, gamma=0.999, last_epoch=last_epoch)
    scheduler_d = torch.optim.lr_scheduler.ExponentialLR(optim_d, gamma=0.999, last_epoch=last_epoch)
    trainset = MelDataset(96, h.segment_size, 1)
    train_sampler = DistributedSampler(trainset)
    train_loader = DataLoader(trainset, num_workers=0, shuffle=False, sampler=train_sampler, batch_size=h.batch_size, drop_last=True)
    if rank == 0:
        validation_loader = DataLoader(MelDataset(12, 256, 2), shuffle=False, batch_size=1)

    generator.train(), mpd.train(), msd.train()
    for epoch in range(max(0, last_epoch), a.training_epochs):
        if rank == 0:
            start = time.time()
            print(f"Epoch: {epoch + 1}")
        train_sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(train_loader):
            y = y.unsqueeze(1)
            y_g_hat = generator(x)
            y_m = mel_spectrogram(y.squeeze(1))
            y_g_mel = mel_spectrogram(y_g_hat.squeeze(1))

            optim_d.zero_grad()
            r, g, _, _ = mpd(y, y_g_hat.detach())
            loss_f = ((1 - r) ** 2).mean() + (g**2).mean()
            r, g, _, _ = msd(y, y_g_hat.detach())
            loss_s = ((1 - r) ** 2).mean() + (g**2).mean()
            loss_disc_all = loss_s + loss_f
            loss_disc_all.backward()
            optim_d.step()

            optim_g.zero_grad()
            loss_mel = F.l1_loss(y_m, y_g_mel) * 45
            _, gf, fr_f, fg_f = mpd(y, y_g_hat)
            _, gs, fr_s, fg_s = msd(y, y_g_hat)
            loss_gen_all = ((1 - gs) ** 2).mean() + ((1 - gf) ** 2).mean() + feature_loss(fr_s, fg_s) + feature_loss(fr_f, fg_f) + loss_mel
            loss_gen_all.backward()
            optim_g.step()

            if rank == 0:
                if steps % a.stdout_interval == 0:
                    with torch.no_grad():
                        mel_error = F.l1_loss(y_m, y_g_mel).item()
                    print(f"Steps : {steps:d}, Gen Loss Total : {loss_gen_all:4.3f}, Mel-Spec. Error : {mel_error:4.3f}")
                if steps % a.checkpoint_interval == 0 and steps != 0:
                    torch.save({"generator": generator.module.state_dict()}, f"{a.checkpoint_path}/g_{steps:08d}")
                    torch.save({"mpd": mpd.module.state_dict(), "msd": msd.module.state_dict(), "optim_g": optim_g.state_dict(), "optim_d": optim_d.state_dict(), "steps": steps, "epoch": epoch}, f"{a.checkpoint_path}/do_{steps:08d}")
                if steps % a.validation_interval == 0:
                    generator.eval()
                    val_err_tot = 0
                    with torch.no_grad():
                        for j, (vx, vy) in enumerate(validation_loader):
                            mel = mel_spectrogram(generator(vx).squeeze(1))
                            val_err_tot += F.l1_loss(mel_spectrogram(vy), mel).item()
                        print(f"validation mel error {val_err_tot / (j + 1):.3f}")
                    generator.train()
            steps += 1
        scheduler_g.step()
        scheduler_d.step()
        if rank == 0:
            print(f"Time taken for epoch {epoch + 1} is {int(time.time() - start)} sec")
    destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--training_epochs", default=4, type=int)
    parser.add_argument("--stdout_interval", default=4, type=int)
    parser.add_argument("--checkpoint_interval", default=12, type=int)
    parser.add_argument("--validation_interval", default=8, type=int)
    a = parser.parse_args()
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    h = AttrDict(seed=1234, learning_rate=2e-3, batch_size=8, segment_size=128, dist_url=f"tcp://localhost:{port}")
    a.num_gpus = 2
    a.checkpoint_path = tempfile.mkdtemp()
    mp.spawn(train, nprocs=a.num_gpus, args=(a, h))


if __name__ == "__main__":
    main()
