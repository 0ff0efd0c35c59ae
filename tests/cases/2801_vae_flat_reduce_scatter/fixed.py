import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, dim=64, hidden=96, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h).clamp(-8, 8)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def elbo_terms(x, recon, mu, logvar):
    rec = F.mse_loss(recon, x, reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return rec, kl


def make_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij"), -1)
    centre = torch.rand(n, 1, 1, 2, generator=g) * 1.4 - 0.7
    width = torch.rand(n, 1, 1, generator=g) * 0.2 + 0.1
    img = torch.exp(-((grid - centre) ** 2).sum(-1) / width)
    return img.reshape(n, 64)


class FlatParams:
    """Keeps the gradients of a module in one padded buffer."""

    def __init__(self, module, world):
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.numel = sum(p.numel() for p in self.params)
        self.padded = (self.numel + world - 1) // world * world
        self.buf = torch.zeros(self.padded)
        self.piece = torch.zeros(self.padded // world)
        self.world = world

    def pack(self):
        off = 0
        for p in self.params:
            self.buf[off:off + p.numel()].copy_(p.grad.reshape(-1))
            off += p.numel()

    def unpack(self):
        off = 0
        for p in self.params:
            p.grad.copy_(self.buf[off:off + p.numel()].view_as(p))
            off += p.numel()

    def exchange(self):
        self.pack()
        dist.reduce_scatter_tensor(self.piece, self.buf, op=dist.ReduceOp.SUM)
        self.piece.div_(self.world)
        dist.all_gather_into_tensor(self.buf, self.piece)
        self.unpack()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--beta", type=float, default=0.05)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train = make_images(4096, seed=11)
    valid = make_images(512, seed=12)
    torch.manual_seed(0)
    model = VAE()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    torch.manual_seed(100 + rank)
    flat = FlatParams(model, world)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    best = float("inf")
    for epoch in range(args.epochs):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))[rank::world]
        model.train()
        total, seen = 0.0, 0
        for i in range(0, len(order) - args.batch_size + 1, args.batch_size):
            x = train[order[i:i + args.batch_size]]
            rec, kl = elbo_terms(x, *model(x))
            loss = (rec + args.beta * kl).mean()
            opt.zero_grad(set_to_none=True)
            loss.backward()
            flat.exchange()
            opt.step()
            total += loss.item() * len(x)
            seen += len(x)

        model.eval()
        mine = valid[rank::world]
        with torch.no_grad():
            rec, kl = elbo_terms(mine, *model(mine))
        stats = torch.tensor([total, float(seen), rec.sum().item(), kl.sum().item(), float(len(mine))])
        dist.all_reduce(stats)
        val = ((stats[2] + args.beta * stats[3]) / stats[4]).item()
        if rank == 0:
            print(json.dumps({"epoch": epoch, "train": round((stats[0] / stats[1]).item(), 4), "valid": round(val, 4)}), flush=True)
            if val < best:
                best = val
                torch.save(model.state_dict(), os.path.join(os.getcwd(), "vae.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
