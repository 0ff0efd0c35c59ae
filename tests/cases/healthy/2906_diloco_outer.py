"""Low-communication training: inner AdamW runs alone on each worker, an outer Nesterov step meets every H steps."""
import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

logger = logging.getLogger("diloco")


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab + 1, dim)
        self.enc = nn.GRU(dim, dim, batch_first=True)
        self.dec = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)
        self.bos = vocab

    def forward(self, src, tgt):
        _, h = self.enc(self.emb(src))
        start = torch.full((len(tgt), 1), self.bos)
        y, _ = self.dec(self.emb(torch.cat([start, tgt[:, :-1]], 1)), h)
        return self.out(y)


def pairs(n, vocab, length, seed):
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(vocab, (n, length), generator=g)
    return TensorDataset(src, src.flip(1))


class OuterLoop:
    def __init__(self, model, lr, momentum, world):
        self.model, self.world = model, world
        self.anchor = [p.detach().clone() for p in model.parameters()]
        self.opt = torch.optim.SGD(self.anchor, lr=lr, momentum=momentum, nesterov=True)
        self.drift = 0.0

    @torch.no_grad()
    def sync(self):
        work = []
        for a, p in zip(self.anchor, self.model.parameters()):
            a.grad = a - p
            work.append(dist.all_reduce(a.grad, async_op=True))
        for w in work:
            w.wait()
        for a in self.anchor:
            a.grad /= self.world
        self.drift = sum(a.grad.square().sum().item() for a in self.anchor) ** 0.5
        self.opt.step()
        for a, p in zip(self.anchor, self.model.parameters()):
            p.copy_(a)


@torch.no_grad()
def token_accuracy(model, loader):
    s = torch.zeros(2)
    for src, tgt in loader:
        s += torch.tensor([(model(src, tgt).argmax(-1) == tgt).sum().item(), float(tgt.numel())])
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument("--inner-steps", type=int, default=20)
    ap.add_argument("--inner-lr", type=float, default=4e-3)
    ap.add_argument("--outer-lr", type=float, default=0.7)
    ap.add_argument("--outer-momentum", type=float, default=0.6)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    torch.manual_seed(8)
    model = Seq2Seq(12)
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    inner = torch.optim.AdamW(model.parameters(), lr=args.inner_lr)
    outer = OuterLoop(model, args.outer_lr, args.outer_momentum, world)
    data, test = pairs(2048, 12, 6, 1), pairs(256, 12, 6, 2)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, batch_size=64, sampler=DistributedSampler(test, shuffle=False))
    epoch, it = 0, iter(loader)
    for rnd in range(args.rounds):
        losses = []
        for _ in range(args.inner_steps):
            batch = next(it, None)
            if batch is None:
                epoch += 1
                sampler.set_epoch(epoch)
                it = iter(loader)
                batch = next(it)
            src, tgt = batch
            loss = nn.functional.cross_entropy(model(src, tgt).flatten(0, 1), tgt.flatten())
            inner.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
            losses.append(loss.detach())
        outer.sync()
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        acc = token_accuracy(model, test_loader)
        logger.info("round %d loss %.4f outer-grad %.3f acc %.3f", rnd, mean / world, outer.drift, acc)
    if rank == 0:
        torch.save({"anchor": outer.anchor, "outer": outer.opt.state_dict()}, "diloco.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
