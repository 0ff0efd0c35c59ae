import argparse
import math
import os
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import default_collate


class RASampler(torch.utils.data.Sampler):
    """Every picture is handed out `repetitions` times per pass, its copies going to neighbouring processes."""

    def __init__(self, dataset, num_replicas, rank, shuffle=True, seed=0, repetitions=3):
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.epoch, self.shuffle, self.seed, self.repetitions = 0, shuffle, seed, repetitions
        self.num_samples = int(math.ceil(len(dataset) * float(repetitions) / num_replicas))
        self.total_size = self.num_samples * num_replicas
        self.num_selected_samples = int(math.floor(len(dataset) // 64 * 64 / num_replicas))

    def __iter__(self):
        if self.shuffle:
            g = torch.Generator()
            g.manual_seed(self.seed + self.epoch)
            indices = torch.randperm(len(self.dataset), generator=g).tolist()
        else:
            indices = list(range(len(self.dataset)))
        indices = [ele for ele in indices for _ in range(self.repetitions)]
        indices += indices[: (self.total_size - len(indices))]
        assert len(indices) == self.total_size
        indices = indices[self.rank: self.total_size: self.num_replicas]
        assert len(indices) == self.num_samples
        return iter(indices[: self.num_selected_samples])

    def __len__(self):
        return self.num_selected_samples

    def set_epoch(self, epoch):
        self.epoch = epoch


class Shapes(Dataset):
    def __init__(self, n, seed, train):
        g = torch.Generator().manual_seed(100)
        self.proto = torch.randn(5, 3, 12, 12, generator=g)
        g.manual_seed(seed)
        self.y = torch.randint(0, 5, (n,), generator=g)
        self.x = 0.7 * self.proto[self.y] + torch.randn(n, 3, 12, 12, generator=g)
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.train:
            dx, dy = (int(v) for v in torch.randint(-1, 2, (2,)))
            x = torch.roll(x, (dy, dx), (1, 2))
        return x, int(self.y[i])


class RandomMixup:
    def __init__(self, n, alpha):
        self.n, self.alpha = n, alpha

    def __call__(self, batch, target):
        target = F.one_hot(target, self.n).float()
        lam = float(torch._sample_dirichlet(torch.tensor([self.alpha, self.alpha]))[0])
        return batch * lam + batch.roll(1, 0) * (1 - lam), target * lam + target.roll(1, 0) * (1 - lam)


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay):
        super().__init__(model, avg_fn=lambda avg, p, n: decay * avg + (1 - decay) * p, use_buffers=True)


def make_net():
    def block(i, o):
        return [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*block(3, 16), *block(16, 32), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 9, 5))


def train_one_epoch(model, criterion, optimizer, loader, epoch, args, model_ema):
    model.train()
    tot, n = 0.0, 0
    for i, (image, target) in enumerate(loader):
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if model_ema and i % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)
        tot += loss.item() * len(image)
        n += len(image)
    return tot / n


def evaluate(model, criterion, loader, log=""):
    model.eval()
    right, seen, loss_sum = 0.0, 0, 0.0
    with torch.inference_mode():
        for image, target in loader:
            out = model(image)
            loss_sum += criterion(out, target).item() * len(target)
            right += (out.argmax(1) == target).sum().item()
            seen += len(target)
    t = torch.tensor([seen, right, loss_sum], dtype=torch.float64)
    dist.barrier()
    dist.all_reduce(t)
    if len(loader.dataset) != int(t[0]) and dist.get_rank() == 0:
        warnings.warn(f"It looks like the dataset has {len(loader.dataset)} samples, but {int(t[0])} samples were "
                      "used for the validation, which might bias the results.")
    if dist.get_rank() == 0:
        print(f"Test: {log} Acc@1 {100 * t[1] / t[0]:.2f} loss {t[2] / t[0]:.4f}", flush=True)
    return (t[1] / t[0]).item()


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    train_set, test_set = Shapes(1000, 1, True), Shapes(250, 2, False)
    sampler = RASampler(train_set, world, rank, shuffle=True, repetitions=args.ra_reps)
    test_sampler = torch.utils.data.distributed.DistributedSampler(test_set, shuffle=False)
    mix = RandomMixup(5, 0.2)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=False,
                        collate_fn=lambda b: mix(*default_collate(b)))
    test_loader = DataLoader(test_set, batch_size=args.batch_size, sampler=test_sampler)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_net()) if args.sync_bn else make_net()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    norm_p = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters(recurse=False)]
    other = [p for p in model.parameters() if all(p is not q for q in norm_p)]
    opt = torch.optim.SGD([{"params": norm_p, "weight_decay": 0.0}, {"params": other, "weight_decay": 1e-4}],
                          lr=args.lr, momentum=0.9, nesterov=True)
    main_s = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs - args.lr_warmup_epochs)
    warm_s = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=args.lr_warmup_epochs)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm_s, main_s], milestones=[args.lr_warmup_epochs])
    model = nn.parallel.DistributedDataParallel(model)
    model_without_ddp = model.module
    # the decay is given per epoch of a single process, so it is rescaled to the real number of updates
    adjust = world * args.batch_size * args.model_ema_steps / args.epochs
    alpha = min(1.0, (1.0 - args.model_ema_decay) * adjust)
    model_ema = ExponentialMovingAverage(model_without_ddp, decay=1.0 - alpha)
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        tr = train_one_epoch(model, criterion, opt, loader, epoch, args, model_ema)
        if rank == 0:
            print(f"epoch {epoch} rank-0 loss {tr:.4f} lr {opt.param_groups[0]['lr']:.4f}")
        sched.step()
        evaluate(model, criterion, test_loader)
        for buf in model_ema.buffers():
            dist.broadcast(buf, 0)
        acc = evaluate(model_ema, criterion, test_loader, log="EMA")
        best = max(best, acc)
        if rank == 0:
            torch.save({"model": model_without_ddp.state_dict(), "optimizer": opt.state_dict(), "epoch": epoch,
                        "lr_scheduler": sched.state_dict(), "model_ema": model_ema.state_dict()}, "checkpoint.pth")
    if rank == 0:
        print("best EMA acc", best)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--lr-warmup-epochs", type=int, default=1)
    p.add_argument("--ra-reps", type=int, default=3)
    p.add_argument("--model-ema-steps", type=int, default=4)
    p.add_argument("--model-ema-decay", type=float, default=0.995)
    p.add_argument("--sync-bn", action="store_true")
    p.add_argument("--seed", type=int, default=7)
    main(p.parse_args())
