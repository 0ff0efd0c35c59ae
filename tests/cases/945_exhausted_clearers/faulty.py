"""Autoencoder with separate optimizers for encoder, decoder and a property head."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RATES = {"encoder": 1e-3, "decoder": 1e-3, "head": 5e-4}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.SiLU(), nn.Linear(32, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 24))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z), self.head(z).squeeze(-1)


def molecules(n=320):
    gen = torch.Generator().manual_seed(81)
    z = torch.randn(n, 6, generator=gen)
    x = torch.tanh(z @ torch.randn(6, 24, generator=gen)) + 0.05 * torch.randn(n, 24, generator=gen)
    return TensorDataset(x, z[:, 0] * z[:, 1])


class Engine:
    def __init__(self, model):
        self.model = model
        parts = dict(model.module.named_children())
        self.optimizers = {name: torch.optim.Adam(parts[name].parameters(), lr=lr) for name, lr in RATES.items()}
        self.clearers = map(lambda o: o.zero_grad, self.optimizers.values())
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in self.optimizers.values()]

    def clear(self):
        for zero in self.clearers:
            zero()

    def step(self, x, prop):
        self.clear()
        recon, guess = self.model(x)
        loss = nn.functional.mse_loss(recon, x) + 0.1 * nn.functional.mse_loss(guess, prop)
        loss.backward()
        for name in ("encoder", "decoder", "head"):
            self.optimizers[name].step()
        return loss.item()

    def end_epoch(self):
        for s in self.schedulers:
            s.step()


def main(epochs=4, batch=16):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    engine = Engine(DDP(Model()))
    data = molecules()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        losses = [engine.step(x, prop) for x, prop in loader]
        engine.end_epoch()
        mean = torch.tensor(losses).mean()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}  loss {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
