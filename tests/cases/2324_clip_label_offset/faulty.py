"""Two-tower image/text style contrastive pretraining with negatives from all processes."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class PairedViews(Dataset):
    def __init__(self, n, seed, latent=16, img_dim=64, txt_len=12, vocab=64):
        shared = torch.Generator().manual_seed(77)
        w_img = torch.randn(latent, img_dim, generator=shared)
        w_txt = torch.randn(latent, vocab, generator=shared)
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(n, latent, generator=g)
        self.img = torch.tanh(z @ w_img / 3) + 0.1 * torch.randn(n, img_dim, generator=g)
        probs = (z @ w_txt).softmax(-1)
        self.txt = torch.multinomial(probs, txt_len, replacement=True, generator=g)

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return self.img[i], self.txt[i]


class TwoTower(nn.Module):
    def __init__(self, img_dim=64, vocab=64, dim=32):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(img_dim, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, dim))
        self.words = nn.EmbeddingBag(vocab, 64, mode="mean")
        self.text = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.1)))

    def forward(self, img, txt):
        i = F.normalize(self.image(img), dim=-1)
        t = F.normalize(self.text(self.words(txt)), dim=-1)
        return i, t, self.logit_scale.clamp(max=math.log(50.0)).exp()


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.size(0)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


class ClipLoss(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, img, txt, scale):
        all_img, all_txt = GatherRows.apply(img), GatherRows.apply(txt)
        per_image = scale * img @ all_txt.t()
        per_text = scale * txt @ all_img.t()
        n = img.size(0)
        labels = torch.arange(n)
        return 0.5 * (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels))


@torch.no_grad()
def recall_at_1(model, dataset, rank, world, chunk=64):
    """Each process scores its own share of the held-out chunks."""
    model.eval()
    hits = torch.zeros(2)
    for start in range(rank * chunk, len(dataset), world * chunk):
        i, t, _ = model(dataset.img[start:start + chunk], dataset.txt[start:start + chunk])
        best = (i @ t.t()).argmax(dim=1)
        hits += torch.tensor([(best == torch.arange(len(best))).sum().item(), len(best)], dtype=torch.float)
    dist.all_reduce(hits)
    model.train()
    return (hits[0] / hits[1]).item()


def param_groups(model, wd):
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": decay, "weight_decay": wd}, {"params": rest, "weight_decay": 0.0}]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=8)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = DDP(TwoTower())
    criterion = ClipLoss(rank)
    train, held = PairedViews(4096, seed=1), PairedViews(512, seed=2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    optimizer = torch.optim.AdamW(param_groups(model, 0.05), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for img, txt in loader:
            i, t, scale = model(img, txt)
            loss = criterion(i, t, scale)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            meter += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(meter)
        r1 = recall_at_1(model.module, held, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {meter[0] / meter[1]:.4f} R@1 {r1:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
