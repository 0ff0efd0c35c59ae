"""Centre-point detector built from a config through registries; iteration-based training loop with hooks."""
import itertools
import os
import weakref

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

CFG = {
    "MODEL": {"META_ARCHITECTURE": "CenterDet", "BACKBONE": "TinyFPN", "WIDTH": 16},
    "SOLVER": {"BASE_LR": 0.004, "MAX_ITER": 80, "STEPS": (55, 70), "IMS_PER_BATCH": 16, "WARMUP_ITERS": 10},
    "TEST": {"EVAL_PERIOD": 40}, "OUTPUT_DIR": "det_output", "PRINT_PERIOD": 20, "SEED": -1,
}


class Registry(dict):
    def register(self, cls):
        self[cls.__name__] = cls
        return cls


BACKBONES, ARCHS = Registry(), Registry()


class Boxes(Dataset):
    """32x32 images, 0 to 3 bright rectangles; a good part of the images is empty"""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            img, boxes = torch.randn(1, 32, 32, generator=g) * 0.3, []
            for _ in range(max(0, int(torch.randint(-2, 4, (1,), generator=g)))):
                w, h = torch.randint(5, 11, (2,), generator=g).tolist()
                x, y = torch.randint(0, 32 - w, (1,), generator=g).item(), torch.randint(0, 32 - h, (1,), generator=g).item()
                img[:, y:y + h, x:x + w] += 1.5
                boxes.append((x + w / 2, y + h / 2, w, h))
            self.items.append({"image": img, "boxes": torch.tensor(boxes).view(-1, 4)})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class TrainingSampler(Sampler):
    """endless stream of permutations, dealt out to the ranks"""

    def __init__(self, size, seed):
        self.size, self.seed, self.rank, self.world = size, seed, dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        return itertools.islice(self.infinite(), self.rank, None, self.world)

    def infinite(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=g).tolist()


def shared_random_seed():
    seed = [int.from_bytes(os.urandom(4), "little") % 2**31]
    dist.broadcast_object_list(seed, src=0)
    return seed[0]


@BACKBONES.register
class TinyFPN(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        w = cfg["MODEL"]["WIDTH"]
        conv = lambda i, o, s: nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.GroupNorm(4, o), nn.ReLU())
        self.stem, self.c4, self.c8 = conv(1, w, 2), conv(w, w, 2), conv(w, w, 2)
        self.lateral = nn.Conv2d(w, w, 1)

    def forward(self, x):
        c4 = self.c4(self.stem(x))
        return self.lateral(c4) + F.interpolate(self.c8(c4), scale_factor=2)


@ARCHS.register
class CenterDet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.backbone = BACKBONES[cfg["MODEL"]["BACKBONE"]](cfg)
        w = cfg["MODEL"]["WIDTH"]
        self.heat, self.size = nn.Conv2d(w, 1, 1), nn.Conv2d(w, 2, 1)
        nn.init.constant_(self.heat.bias, -3.0)

    def forward(self, inputs):
        feat = self.backbone(torch.stack([d["image"] for d in inputs]))
        heat, size = self.heat(feat).squeeze(1), self.size(feat)
        return self.losses(heat, size, inputs) if self.training else self.inference(heat, size)

    def losses(self, heat, size, inputs):
        target = torch.zeros_like(heat)
        picks = [(b, int(y // 4), int(x // 4), w, h) for b, d in enumerate(inputs) for x, y, w, h in d["boxes"].tolist()]
        for b, y, x, _, _ in picks:
            target[b, y, x] = 1
        num = torch.tensor(float(len(picks)))
        dist.all_reduce(num)
        num = (num / dist.get_world_size()).clamp(min=1)
        p = heat.sigmoid()
        focal = F.binary_cross_entropy_with_logits(heat, target, reduction="none") * (target - p).abs() ** 2
        if picks:
            b, y, x, w, h = zip(*picks)
            reg = F.l1_loss(size[list(b), :, list(y), list(x)], torch.tensor([w, h]).T / 10, reduction="sum")
        else:
            reg = size.sum() * 0
        return {"loss_heat": focal.sum() / num, "loss_size": reg / num}

    def inference(self, heat, size):
        peak = (heat == F.max_pool2d(heat[:, None], 3, 1, 1)[:, 0]) & (heat.sigmoid() > 0.3)
        return [(peak[i].nonzero(), size[i][:, peak[i]].T * 10) for i in range(len(heat))]


class HookBase:
    def after_step(self): ...


class LRWarmupMultiStep(HookBase):
    def after_step(self):
        self.trainer.scheduler.step()


class EvalHook(HookBase):
    def after_step(self):
        t = self.trainer
        if (t.iter + 1) % t.cfg["TEST"]["EVAL_PERIOD"] == 0:
            results = inference_on_dataset(t.model, t.test_loader)
            if results:
                print(f"iter {t.iter + 1} recall {results['recall']:.3f} precision {results['precision']:.3f}", flush=True)
            dist.barrier()


class Checkpointer(HookBase):
    def after_step(self):
        t = self.trainer
        if t.iter + 1 == t.cfg["SOLVER"]["MAX_ITER"]:
            os.makedirs(t.cfg["OUTPUT_DIR"], exist_ok=True)
            torch.save({"model": t.model.module.state_dict(), "iteration": t.iter}, f"{t.cfg['OUTPUT_DIR']}/model_final.pth")


@torch.no_grad()
def inference_on_dataset(model, loader):
    training = model.training
    model.eval()
    predictions = []
    for inputs in loader:
        for d, (cells, _) in zip(inputs, model.module(inputs)):
            truth = {(int(y // 4), int(x // 4)) for x, y, _, _ in d["boxes"].tolist()}
            found = {tuple(c) for c in cells.tolist()}
            predictions.append((len(truth & found), len(truth), len(found)))
    model.train(training)
    gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(predictions, gathered, dst=0)
    if dist.get_rank() != 0:
        return {}
    hit, truth, found = (sum(c) for c in zip(*itertools.chain(*gathered)))
    return {"recall": hit / max(truth, 1), "precision": hit / max(found, 1)}


class DefaultTrainer:
    def __init__(self, cfg):
        self.cfg, rank, world = cfg, dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(ARCHS[cfg["MODEL"]["META_ARCHITECTURE"]](cfg))
        norm, other = [], []
        for m in self.model.modules():
            (norm if isinstance(m, nn.GroupNorm) else other).extend(m.parameters(recurse=False))
        s = cfg["SOLVER"]
        self.optimizer = torch.optim.AdamW([{"params": other, "weight_decay": 1e-3}, {"params": norm, "weight_decay": 0.0}], lr=s["BASE_LR"])
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda i: min(1, (i + 1) / s["WARMUP_ITERS"]) * 0.1 ** sum(i >= m for m in s["STEPS"]))
        train, test = Boxes(300, 1), Boxes(61, 2)
        self.train_loader = DataLoader(train, s["IMS_PER_BATCH"] // world, sampler=TrainingSampler(len(train), shared_random_seed()),
                                       collate_fn=list)
        self.test_loader = DataLoader(test, 8, sampler=range(rank, len(test), world), collate_fn=list)
        self.hooks = [LRWarmupMultiStep(), EvalHook()] + ([Checkpointer()] if rank == 0 else [])
        for h in self.hooks:
            h.trainer = weakref.proxy(self)

    def train(self):
        data = iter(self.train_loader)
        self.model.train()
        for self.iter in range(self.cfg["SOLVER"]["MAX_ITER"]):
            losses = self.model(next(data))
            self.optimizer.zero_grad()
            sum(losses.values()).backward()
            self.optimizer.step()
            if (self.iter + 1) % self.cfg["PRINT_PERIOD"] == 0:
                self.write_metrics({k: v.item() for k, v in losses.items()})
            for h in self.hooks:
                h.after_step()

    def write_metrics(self, metrics):
        everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(metrics, everyone, dst=0)
        if everyone is not None:
            print(self.iter + 1, {k: round(sum(m[k] for m in everyone) / len(everyone), 4) for k in metrics}, flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(shared_random_seed() + dist.get_rank())
    DefaultTrainer(CFG).train()
    dist.barrier()
    dist.destroy_process_group()
