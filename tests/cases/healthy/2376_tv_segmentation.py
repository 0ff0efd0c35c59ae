import argparse
import datetime
import os
import time
from collections import defaultdict, deque

import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn
from torch.nn import functional as F


class SmoothedValue:
    def __init__(self, window_size=20, fmt=None):
        self.deque = deque(maxlen=window_size)
        self.total, self.count = 0.0, 0
        self.fmt = fmt or "{median:.4f} ({global_avg:.4f})"

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self):
        t = reduce_across_processes([self.count, self.total]).tolist()
        self.count, self.total = int(t[0]), t[1]

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    def __str__(self):
        return self.fmt.format(median=self.median, global_avg=self.global_avg, value=self.deque[-1])


class ConfusionMatrix:
    def __init__(self, num_classes):
        self.num_classes = num_classes
        self.mat = None

    def update(self, a, b):
        n = self.num_classes
        if self.mat is None:
            self.mat = torch.zeros((n, n), dtype=torch.int64)
        with torch.inference_mode():
            k = (a >= 0) & (a < n)
            self.mat += torch.bincount(n * a[k].to(torch.int64) + b[k], minlength=n ** 2).reshape(n, n)

    def compute(self):
        h = self.mat.float()
        acc_global = torch.diag(h).sum() / h.sum()
        iu = torch.diag(h) / (h.sum(1) + h.sum(0) - torch.diag(h))
        return acc_global, iu

    def reduce_from_all_processes(self):
        self.mat = reduce_across_processes(self.mat).to(torch.int64)

    def __str__(self):
        acc_global, iu = self.compute()
        return f"global correct: {acc_global.item() * 100:.1f}\nIoU: {[f'{i:.1f}' for i in (iu * 100).tolist()]}\n" \
               f"mean IoU: {iu.mean().item() * 100:.1f}"


class MetricLogger:
    def __init__(self, delimiter="\t"):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            self.meters[k].update(v.item() if isinstance(v, torch.Tensor) else v)

    def synchronize_between_processes(self):
        for meter in self.meters.values():
            meter.synchronize_between_processes()

    def add_meter(self, name, meter):
        self.meters[name] = meter

    def __str__(self):
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())

    def log_every(self, iterable, print_freq, header=""):
        start = time.time()
        for i, obj in enumerate(iterable):
            yield obj
            if i % print_freq == 0:
                print(self.delimiter.join([header, f"[{i}/{len(iterable)}]", str(self)]))
        print(f"{header} Total time: {datetime.timedelta(seconds=int(time.time() - start))}")


def reduce_across_processes(val):
    t = val.clone().double() if isinstance(val, torch.Tensor) else torch.tensor(val, dtype=torch.float64)
    dist.barrier()
    dist.all_reduce(t)
    return t


def setup_for_distributed(is_master):
    import builtins as __builtin__
    builtin_print = __builtin__.print

    def print(*args, **kwargs):
        force = kwargs.pop("force", False)
        if is_master or force:
            builtin_print(*args, **kwargs)

    __builtin__.print = print


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        print("Not using distributed mode")
        args.distributed = False
        return
    args.distributed = True
    print(f"| distributed init (rank {args.rank}): {args.dist_url}", flush=True)
    dist.init_process_group(backend="gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    dist.barrier()
    setup_for_distributed(args.rank == 0)


class Shapes(torch.utils.data.Dataset):
    """Squares (1) and discs (2) on a noisy ground, a thin 255 border is not scored."""

    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        img = 0.3 * torch.randn(3, 24, 24, generator=g)
        target = torch.zeros(24, 24, dtype=torch.int64)
        yy, xx = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
        for kind in (1, 2):
            cy, cx = torch.randint(5, 19, (2,), generator=g).tolist()
            inside = ((yy - cy).abs().maximum((xx - cx).abs()) < 4) if kind == 1 else ((yy - cy) ** 2 + (xx - cx) ** 2 < 20)
            target[inside] = kind
            img[kind - 1, inside] += 1.0
        target[0] = target[-1] = 255
        return img, target


class FCN(nn.Module):
    def __init__(self, num_classes, aux_loss):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(12, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU())
        self.classifier = nn.Conv2d(24, num_classes, 1)
        self.aux_classifier = nn.Conv2d(12, num_classes, 1) if aux_loss else None

    def forward(self, x):
        size = x.shape[-2:]
        low = self.stem(x)
        result = {"out": F.interpolate(self.classifier(self.body(low)), size=size, mode="bilinear", align_corners=False)}
        if self.aux_classifier is not None:
            result["aux"] = self.aux_classifier(low)
        return result


def criterion(inputs, target):
    losses = {name: F.cross_entropy(x, target, ignore_index=255) for name, x in inputs.items()}
    return losses["out"] if len(losses) == 1 else losses["out"] + 0.5 * losses["aux"]


def evaluate(model, data_loader, num_classes):
    model.eval()
    confmat = ConfusionMatrix(num_classes)
    metric_logger = MetricLogger(delimiter="  ")
    num_processed_samples = 0
    with torch.inference_mode():
        for image, target in data_loader:
            output = model(image)["out"]
            metric_logger.update(loss=F.cross_entropy(output, target, ignore_index=255))
            confmat.update(target.flatten(), output.argmax(1).flatten())
            num_processed_samples += image.shape[0]
        confmat.reduce_from_all_processes()
    metric_logger.synchronize_between_processes()
    num_processed_samples = int(reduce_across_processes(num_processed_samples).item())
    if num_processed_samples != len(data_loader.dataset):
        print(f"samples seen {num_processed_samples}, data set has {len(data_loader.dataset)}", force=True)
    print(f"Test: {metric_logger}")
    return confmat


def train_one_epoch(model, optimizer, data_loader, lr_scheduler, epoch, print_freq):
    model.train()
    metric_logger = MetricLogger(delimiter="  ")
    metric_logger.add_meter("lr", SmoothedValue(window_size=1, fmt="{value:.5f}"))
    for image, target in metric_logger.log_every(data_loader, print_freq, f"Epoch: [{epoch}]"):
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])


def main(args):
    os.makedirs(args.output_dir, exist_ok=True)
    init_distributed_mode(args)
    print(args)
    torch.manual_seed(0)
    dataset, dataset_test = Shapes(480, 1), Shapes(96, 2)
    train_sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    test_sampler = torch.utils.data.distributed.DistributedSampler(dataset_test, shuffle=False)
    data_loader = torch.utils.data.DataLoader(dataset, args.batch_size, sampler=train_sampler,
                                              num_workers=args.workers, drop_last=True)
    data_loader_test = torch.utils.data.DataLoader(dataset_test, 1, sampler=test_sampler, num_workers=args.workers)

    model = FCN(3, args.aux_loss)
    model = nn.parallel.DistributedDataParallel(model)
    model_without_ddp = model.module
    params_to_optimize = [
        {"params": list(model_without_ddp.stem.parameters()) + list(model_without_ddp.body.parameters())},
        {"params": model_without_ddp.classifier.parameters()},
        {"params": model_without_ddp.aux_classifier.parameters(), "lr": args.lr * 10},
    ]
    optimizer = torch.optim.SGD(params_to_optimize, lr=args.lr, momentum=0.9, weight_decay=1e-4)
    iters = len(data_loader)
    lr_scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=iters * args.epochs, power=0.9)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, data_loader, lr_scheduler, epoch, 10)
        confmat = evaluate(model, data_loader_test, 3)
        print(confmat)
        if args.rank == 0:
            torch.save({"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(),
                        "lr_scheduler": lr_scheduler.state_dict(), "epoch": epoch},
                       os.path.join(args.output_dir, "checkpoint.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("-b", "--batch-size", default=8, type=int)
    p.add_argument("--epochs", default=3, type=int)
    p.add_argument("-j", "--workers", default=1, type=int)
    p.add_argument("--lr", default=0.03, type=float)
    p.add_argument("--aux-loss", default=True)
    p.add_argument("--output-dir", default="seg_out")
    p.add_argument("--dist-url", default="env://")
    main(p.parse_args())
