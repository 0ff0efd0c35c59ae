"""Box regressor with a hook based trainer, an endless shared-seed sampler and an uneven inference split."""
import itertools
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


def shared_seed():
    box = [int(torch.randint(0, 2 ** 31 - 1, (1,)).item())]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, box[0])
    return gathered[0]


class EndlessSampler(Sampler):
    def __init__(self, size, seed):
        self.size, self.seed = size, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        return itertools.islice(self.infinite(), self.rank, None, self.world)

    def infinite(self):
        g = torch.Generator()
        g.manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=g).tolist()


class InferenceSampler(Sampler):
    def __init__(self, size):
        rank, world = dist.get_rank(), dist.get_world_size()
        share, left = divmod(size, world)
        sizes = [share + (r < left) for r in range(world)]
        start = sum(sizes[:rank])
        self.span = range(start, start + sizes[rank])

    def __iter__(self):
        return iter(self.span)

    def __len__(self):
        return len(self.span)


class Squares(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.corner = torch.randint(0, 10, (n, 2), generator=g)
        self.side = torch.randint(3, 6, (n, 1), generator=g)
        self.noise = 0.1 * torch.randn(n, 1, 16, 16, generator=g)

    def __len__(self):
        return len(self.corner)

    def __getitem__(self, i):
        image = self.noise[i].clone()
        (r, c), s = self.corner[i].tolist(), int(self.side[i])
        image[0, r:r + s, c:c + s] += 1
        return {"image_id": i, "image": image, "box": torch.tensor([r, c, r + s, c + s]) / 16}


class HookBase:
    trainer = None

    def after_step(self):
        pass

    def after_train(self):
        pass


class LRHook(HookBase):
    def __init__(self, scheduler):
        self.scheduler = scheduler

    def after_step(self):
        self.scheduler.step()


class PrintHook(HookBase):
    def __init__(self, period):
        self.period = period

    def after_step(self):
        if (self.trainer.iteration + 1) % self.period == 0:
            everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(self.trainer.last_loss, everyone, dst=0)
            if everyone is not None:
                print(f"iter {self.trainer.iteration + 1} loss {sum(everyone) / len(everyone):.4f}", flush=True)


class PeriodicCheckpointer(HookBase):
    def __init__(self, period, folder):
        self.period, self.folder = period, folder

    def after_step(self):
        if (self.trainer.iteration + 1) % self.period == 0 and dist.get_rank() == 0:
            os.makedirs(self.folder, exist_ok=True)
            name = os.path.join(self.folder, f"model_{self.trainer.iteration:07d}.pth")
            torch.save({"model": self.trainer.model.module.state_dict(), "iteration": self.trainer.iteration}, name)
            with open(os.path.join(self.folder, "last_checkpoint"), "w") as f:
                f.write(os.path.basename(name))


class EvalHook(HookBase):
    def __init__(self, period, function):
        self.period, self.function = period, function

    def after_step(self):
        if (self.trainer.iteration + 1) % self.period == 0:
            results = self.function(self.trainer.model.module)
            if results:
                print("eval", results, flush=True)
            dist.barrier()


class Trainer:
    def __init__(self, model, optimizer, loader, max_iter, hooks):
        self.model, self.optimizer, self.max_iter = model, optimizer, max_iter
        self.stream = iter(loader)
        self.hooks = hooks
        for hook in hooks:
            hook.trainer = self

    def train(self):
        self.model.train()
        for self.iteration in range(self.max_iter):
            batch = next(self.stream)
            loss = nn.functional.smooth_l1_loss(self.model(batch["image"]), batch["box"], beta=0.1)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.last_loss = loss.item()
            for hook in self.hooks:
                hook.after_step()
        for hook in self.hooks:
            hook.after_train()


def inference(model, dataset):
    model.eval()
    loader = DataLoader(dataset, batch_size=16, sampler=InferenceSampler(len(dataset)))
    predictions = []
    with torch.no_grad():
        for batch in loader:
            error = (model(batch["image"]) - batch["box"]).abs().mean(1)
            predictions.extend({"id": int(i), "l1": float(e)} for i, e in zip(batch["image_id"], error))
    model.train()
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(predictions, parts, dst=0)
    if dist.get_rank() != 0:
        return {}
    merged = sorted(itertools.chain(*parts), key=lambda p: p["id"])
    assert len({p["id"] for p in merged}) == len(dataset)
    os.makedirs("det_out", exist_ok=True)
    with open("det_out/instances.json", "w") as f:
        json.dump(merged, f)
    return {"l1": round(sum(p["l1"] for p in merged) / len(merged), 4)}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(71 + dist.get_rank())
    train, val = Squares(1500, 1), Squares(301, 2)
    loader = DataLoader(train, batch_size=24, sampler=EndlessSampler(len(train), shared_seed()))
    body = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
                         nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4))
    model = DDP(body, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [60, 90], gamma=0.3)
    hooks = [LRHook(scheduler), PeriodicCheckpointer(60, "det_out"), EvalHook(60, lambda m: inference(m, val)), PrintHook(20)]
    Trainer(model, optimizer, loader, 120, hooks).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
