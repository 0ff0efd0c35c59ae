"""Differentially private training of a small classifier: per-sample gradients with torch.func, clipped, noised."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def patients(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 4, (n,), generator=g)
    means = torch.randn(4, 20, generator=torch.Generator().manual_seed(77)) * 0.6
    return TensorDataset(means[label] + torch.randn(n, 20, generator=g), label)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x))


class PrivateEngine:
    """Turns a batch into one noisy gradient for the whole (global) batch."""

    def __init__(self, model, max_norm, noise_multiplier, seed):
        self.model = model
        self.max_norm = max_norm
        self.sigma = noise_multiplier * max_norm
        self.gen = torch.Generator().manual_seed(seed)
        self.per_sample = vmap(grad(self._loss), in_dims=(None, 0, 0))

    def _loss(self, params, x, y):
        logits = functional_call(self.model, params, (x.unsqueeze(0),))
        return F.cross_entropy(logits, y.unsqueeze(0))

    def fill(self, x, y):
        params = {k: v.detach() for k, v in self.model.named_parameters()}
        grads = self.per_sample(params, x, y)
        flat = torch.cat([g.flatten(1) for g in grads.values()], dim=1)
        norms = flat.norm(dim=1)
        factor = (self.max_norm / (norms + 1e-6)).clamp(max=1.0)
        total = torch.cat([(factor @ flat), torch.tensor([float(len(x))])])
        dist.all_reduce(total)
        summed, count = total[:-1], total[-1]
        noisy = (summed + self.sigma * torch.randn(summed.shape, generator=self.gen)) / count
        at = 0
        for p in self.model.parameters():
            p.grad = noisy[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        return (norms > self.max_norm).float().mean()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hit = torch.zeros(2)
    for x, y in loader:
        hit += torch.tensor([(model(x).argmax(1) == y).sum().item(), float(len(y))])
    dist.all_reduce(hit)
    model.train()
    return (hit[0] / hit[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--noise", type=float, default=1.1)
    ap.add_argument("--max-norm", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=12)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(args.seed)
    model = Classifier()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.8)
    engine = PrivateEngine(model, args.max_norm, args.noise, seed=args.seed + 500)

    train, test = patients(4096, 31), patients(1024, 32)
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, 256, sampler=DistributedSampler(test, shuffle=False))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        clipped = torch.zeros(())
        for x, y in loader:
            clipped += engine.fill(x, y)
            opt.step()
        clipped /= len(loader)
        dist.all_reduce(clipped)
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch} clipped {clipped.item() / dist.get_world_size():.2f} acc {acc:.3f}", flush=True)
    if rank == 0:
        torch.save({"model": model.state_dict(), "sigma": engine.sigma}, "private.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
