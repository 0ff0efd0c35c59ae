"""A tiny re-creation of module hooks: the module says what a step is, the Trainer owns the loop."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Module(nn.Module):
    def training_step(self, batch, batch_idx): ...
    def validation_step(self, batch, batch_idx): ...
    def configure_optimizers(self): ...
    def on_train_epoch_start(self): ...
    def on_train_epoch_end(self): ...

    def log(self, name, value):
        self.trainer.logged.setdefault(name, []).append(float(value))


class LitAutoEncoder(Module):
    def __init__(self, dim=32, latent=3, lr=5e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 24), nn.ReLU(), nn.Linear(24, dim))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        return F.mse_loss(self.decoder(self.encoder(x)), x, reduction="none").mean(1)

    def configure_optimizers(self):
        opt = optim.Adam(self.parameters(), lr=self.lr)
        return {"optimizer": opt, "lr_scheduler": optim.lr_scheduler.CosineAnnealingLR(opt, 40)}


class _ForwardRedirect(nn.Module):
    """DDP only sees forward(); send it on to training_step so that the reducer is armed."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module.training_step(*args)


class DataModule:
    def __init__(self, n_train=320, n_val=64, batch_size=16):
        g = torch.Generator().manual_seed(11)
        basis = torch.randn(3, 32, generator=g)
        self.train = TensorDataset(torch.randn(n_train, 3, generator=g) @ basis)
        self.val = TensorDataset(torch.randn(n_val, 3, generator=g) @ basis)
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, sampler=DistributedSampler(self.train, shuffle=True))

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, sampler=DistributedSampler(self.val, shuffle=False))


class Trainer:
    def __init__(self, max_epochs):
        self.max_epochs, self.logged = max_epochs, {}
        dist.init_process_group("gloo")
        self.global_rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    @property
    def is_global_zero(self):
        return self.global_rank == 0

    def reduce_mean(self, values):
        t = torch.tensor([sum(values), len(values)], dtype=torch.float64)
        dist.all_reduce(t)
        return (t[0] / t[1]).item()

    def fit(self, module, datamodule):
        module.trainer = self
        wrapped = DistributedDataParallel(_ForwardRedirect(module))
        conf = module.configure_optimizers()
        opt, sched = conf["optimizer"], conf["lr_scheduler"]
        train, val = datamodule.train_dataloader(), datamodule.val_dataloader()
        for epoch in range(self.max_epochs):
            if hasattr(train.sampler, "set_epoch"):
                train.sampler.set_epoch(epoch)
            self.logged.clear()
            module.train()
            module.on_train_epoch_start()
            for i, batch in enumerate(train):
                def closure():
                    opt.zero_grad()
                    loss = wrapped(batch, i)
                    loss.backward()
                    return loss
                opt.step(closure)
                sched.step()
            module.on_train_epoch_end()
            module.eval()
            with torch.no_grad():
                errors = torch.cat([module.validation_step(b, i) for i, b in enumerate(val)])
            val_loss = self.reduce_mean(errors.tolist())
            train_loss = self.reduce_mean(self.logged["train_loss"])
            if self.is_global_zero:
                print(f"epoch {epoch} train_loss={train_loss:.4f} val_loss={val_loss:.4f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    Trainer(max_epochs=4).fit(LitAutoEncoder(), DataModule())
