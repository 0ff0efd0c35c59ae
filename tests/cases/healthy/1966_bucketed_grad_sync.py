"""DDPM on a 2-D toy density. Gradients are averaged without DDP: flat buckets, reduced while backward still runs."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn


class BucketedGradSync:
    """Average gradients over all processes in flat buckets.

    A bucket is sent when all its gradients are there *and* all earlier buckets have been sent, so that every process
    issues its collectives in the same order whatever order autograd happens to take.
    """

    def __init__(self, params, bucket_elems):
        self.world = dist.get_world_size()
        self.buckets, current, size = [], [], 0
        for p in reversed([p for p in params if p.requires_grad]):
            if current and size + p.numel() > bucket_elems:
                self.buckets.append(current)
                current, size = [], 0
            current.append(p)
            size += p.numel()
        self.buckets.append(current)
        self.flats = [torch.zeros(sum(p.numel() for p in b)) for b in self.buckets]
        self.pending = [len(b) for b in self.buckets]
        self.next_to_send = 0
        self.handles = []
        for i, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda _, i=i: self._ready(i))

    @torch.no_grad()
    def broadcast_parameters(self, module, src=0):
        for tensor in list(module.parameters()) + list(module.buffers()):
            dist.broadcast(tensor, src=src)

    def _ready(self, i):
        self.pending[i] -= 1
        while self.next_to_send < len(self.buckets) and self.pending[self.next_to_send] == 0:
            j = self.next_to_send
            torch.cat([p.grad.flatten() for p in self.buckets[j]], out=self.flats[j])
            self.handles.append(dist.all_reduce(self.flats[j], async_op=True))
            self.next_to_send += 1

    @torch.no_grad()
    def finish(self):
        assert self.next_to_send == len(self.buckets), "a parameter got no gradient"
        for handle, bucket, flat in zip(self.handles, self.buckets, self.flats):
            handle.wait()
            flat.div_(self.world)
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(piece.view_as(p))
        self.handles.clear()
        self.pending = [len(b) for b in self.buckets]
        self.next_to_send = 0


class Denoiser(nn.Module):
    def __init__(self, width=96, steps=100):
        super().__init__()
        self.embed = nn.Embedding(steps, width)
        self.inp = nn.Linear(2, width)
        self.body = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(),
                                                nn.Linear(width, width)) for _ in range(3))
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        h = self.inp(x) + self.embed(t)
        for layer in self.body:
            h = h + layer(h)
        return self.out(h)


def sample_data(n, generator):
    """Eight Gaussians on a circle."""
    k = torch.randint(8, (n,), generator=generator).float() * (torch.pi / 4)
    return torch.stack([k.cos(), k.sin()], dim=1) * 1.5 + 0.08 * torch.randn(n, 2, generator=generator)


@torch.no_grad()
def draw(model, alphas_bar, betas, n, generator):
    model.eval()
    x = torch.randn(n, 2, generator=generator)
    for t in reversed(range(len(betas))):
        eps = model(x, torch.full((n,), t))
        x = (x - betas[t] / (1 - alphas_bar[t]).sqrt() * eps) / (1 - betas[t]).sqrt()
        if t > 0:
            x = x + betas[t].sqrt() * torch.randn(n, 2, generator=generator)
    return x


@torch.no_grad()
def update_ema(ema, model, decay):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.lerp_(p, 1 - decay)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=300)
    ap.add_argument("--batch", type=int, default=128, help="samples per process")
    ap.add_argument("--bucket-elems", type=int, default=20_000)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--ema", type=float, default=0.98)
    opt = ap.parse_args()

    dist.init_process_group(backend="gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(7)
    model = Denoiser()
    sync = BucketedGradSync(list(model.parameters()), opt.bucket_elems)
    sync.broadcast_parameters(model)
    ema = copy.deepcopy(model).requires_grad_(False)

    betas = torch.linspace(1e-3, 0.12, 100)
    alphas_bar = torch.cumprod(1 - betas, dim=0)
    generator = torch.Generator().manual_seed(1234 + rank)  # every process draws its own data, times and noise
    adam = torch.optim.Adam(model.parameters(), lr=opt.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=opt.iters, eta_min=opt.lr / 20)

    log_every, running = 50, torch.zeros(())
    for it in range(1, opt.iters + 1):
        x0 = sample_data(opt.batch, generator)
        t = torch.randint(len(betas), (opt.batch,), generator=generator)
        noise = torch.randn(x0.shape, generator=generator)
        a = alphas_bar[t].unsqueeze(1)
        loss = (model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).pow(2).mean()

        adam.zero_grad(set_to_none=True)
        loss.backward()
        sync.finish()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the averaged gradient
        adam.step()
        schedule.step()
        update_ema(ema, model, opt.ema)

        running += loss.detach()
        if it % log_every == 0:
            dist.all_reduce(running)
            if rank == 0:
                print(f"it {it:4d} loss {running.item() / (log_every * world):.4f} lr {schedule.get_last_lr()[0]:.2e}",
                      flush=True)
            running.zero_()

    if rank == 0:
        points = draw(ema, alphas_bar, betas, 512, torch.Generator().manual_seed(9))
        print(f"mean radius of samples {points.norm(dim=1).mean():.3f} (data: 1.5)")
        torch.save({"ema": ema.state_dict(), "samples": points}, "ddpm2d.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
