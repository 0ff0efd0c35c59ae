import copy
import dataclasses
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclasses.dataclass
class Config:
    videos: int = 160
    held_out: int = 45
    frames: int = 20
    clip: int = 6
    size: int = 12
    classes: int = 4
    batch: int = 8
    epochs: int = 5
    lr: float = 2e-3
    ema: float = 0.97
    drop_path: float = 0.2
    views: int = 3


class Videos(Dataset):
    """A blob that moves left, right, up or down over a noisy background."""

    def __init__(self, cfg, n, offset, train):
        self.cfg, self.n, self.offset, self.train = cfg, n, offset, train

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        c = self.cfg
        g = torch.Generator().manual_seed(self.offset + i)
        label = (self.offset + i) % c.classes
        dx, dy = [(1, 0), (-1, 0), (0, 1), (0, -1)][label]
        x0, y0 = torch.randint(0, c.size, (2,), generator=g).tolist()
        video = 0.3 * torch.randn(1, c.frames, c.size, c.size, generator=g)
        for t in range(c.frames):
            ys = (torch.arange(3) + y0 + dy * t) % c.size
            xs = (torch.arange(3) + x0 + dx * t) % c.size
            video[0, t, ys[:, None], xs[None, :]] += 2.0
        if not self.train:
            return video, label
        start = int(torch.randint(0, c.frames - c.clip + 1, ()))
        clip = video[:, start:start + c.clip]
        return clip * (1 + 0.1 * torch.randn(())), label


class Block(nn.Module):
    def __init__(self, ch, p):
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(ch, ch, 3, padding=1), nn.GroupNorm(4, ch), nn.ReLU(), nn.Conv3d(ch, ch, 3, padding=1))
        self.p = p

    def forward(self, x):
        y = self.body(x)
        if self.training and self.p > 0:
            keep = (torch.rand(x.shape[0], 1, 1, 1, 1) >= self.p).float() / (1 - self.p)
            y = y * keep
        return x + y


class VideoNet(nn.Module):
    def __init__(self, cfg, ch=16, depth=2):
        super().__init__()
        self.stem = nn.Conv3d(1, ch, 3, stride=(1, 2, 2), padding=1)
        self.blocks = nn.Sequential(*[Block(ch, cfg.drop_path * (i + 1) / depth) for i in range(depth)])
        self.head = nn.Linear(ch, cfg.classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).relu().mean((2, 3, 4)))


class Average:
    """Exponential average of the weights; lives on every rank, the same everywhere."""

    def __init__(self, model, decay):
        self.decay, self.steps = decay, 0
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}
        self.saved = None

    @torch.no_grad()
    def update(self, model):
        self.steps += 1
        d = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for k, v in model.state_dict().items():
            self.shadow[k].lerp_(v, 1 - d)

    def __call__(self, model):
        self.model = model
        return self

    def __enter__(self):
        self.saved = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.shadow)
        return self.model

    def __exit__(self, *exc):
        self.model.load_state_dict(self.saved)
        self.saved = None


@torch.no_grad()
def evaluate(model, loader, cfg):
    model.eval()
    hits = torch.zeros(2)
    starts = [round(k * (cfg.frames - cfg.clip) / (cfg.views - 1)) for k in range(cfg.views)]
    for video, label in loader:
        prob = sum(model(video[:, :, s:s + cfg.clip]).softmax(-1) for s in starts)
        hits += torch.tensor([(prob.argmax(-1) == label).sum().item(), len(label)])
    dist.all_reduce(hits)
    model.train()
    return (hits[0] / hits[1]).item()


def main(cfg=Config()):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = VideoNet(cfg)
    ddp = DistributedDataParallel(net)
    torch.manual_seed(1234 + rank)
    train = Videos(cfg, cfg.videos, 0, True)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=cfg.batch, sampler=sampler, drop_last=True)
    held = Videos(cfg, cfg.held_out, 10_000, False)
    test = DataLoader(torch.utils.data.Subset(held, range(rank, cfg.held_out, world)), batch_size=16)
    opt = torch.optim.AdamW(ddp.parameters(), lr=cfg.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg.lr * 2, total_steps=cfg.epochs * len(loader))
    ema = Average(net, cfg.ema)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for clip, label in loader:
            loss = nn.functional.cross_entropy(ddp(clip), label)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            ema.update(net)
            total += torch.tensor([loss.item() * len(label), len(label)])
        dist.all_reduce(total)
        raw = evaluate(net, test, cfg)
        with ema(net) as averaged:
            smooth = evaluate(averaged, test, cfg)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.3f} acc {raw:.3f} ema {smooth:.3f}", flush=True)
    if rank == 0:
        torch.save({"model": net.state_dict(), "ema": ema.shadow, "cfg": dataclasses.asdict(cfg)}, "video.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
