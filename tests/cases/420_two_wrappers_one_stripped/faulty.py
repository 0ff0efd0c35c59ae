"""Pretrain a small autoencoder, then fine-tune a classifier from its encoder."""
import os
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CHECKPOINT = pathlib.Path("pretrained.pt")


class WithInputNorm(nn.Module):
    """standardises the input of any module"""

    def __init__(self, module, mean, std):
        super().__init__()
        self.module = module
        self.register_buffer("mean", torch.as_tensor(mean), persistent=False)
        self.register_buffer("std", torch.as_tensor(std), persistent=False)

    def forward(self, x):
        return self.module((x - self.mean) / self.std)


def encoder():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6))


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = encoder(), nn.Linear(6, 16)

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = encoder(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.encoder(x).tanh())


def batches(rank, seed, steps, size=40):
    g = torch.Generator().manual_seed(seed * 100 + rank)
    basis = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)) * 2
    for _ in range(steps):
        y = torch.randint(0, 3, (size,), generator=g)
        yield 3 + basis[y] + torch.randn(size, 16, generator=g), y


def strip(state, prefix="module."):
    return {k[len(prefix) :] if k.startswith(prefix) else k: v for k, v in state.items()}


def load_pretrained(net):
    state = strip(torch.load(CHECKPOINT, weights_only=True))
    net.load_state_dict(state, strict=False)
    return net


def train(model, data, loss_fn, lr):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for x, y in data:
        opt.zero_grad()
        loss = loss_fn(model(x), x, y)
        loss.backward()
        opt.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(WithInputNorm(AutoEncoder(), 3.0, 2.0))
    loss = train(model, batches(rank, 1, 30), lambda out, x, y: nn.functional.mse_loss(out, x), 1e-2)
    if rank == 0:
        torch.save(model.state_dict(), CHECKPOINT)
        print(f"pretraining loss {loss:.3f}, saved {CHECKPOINT}")
    dist.barrier()
    net = load_pretrained(Classifier())
    model = DDP(WithInputNorm(net, 3.0, 2.0))
    loss = train(model, batches(rank, 2, 25), lambda out, x, y: nn.functional.cross_entropy(out, y), 1e-2)
    if rank == 0:
        print(f"loaded {CHECKPOINT}; fine-tuning loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
