"""torchvision references/classification train.py in small: mixup collate, label smoothing, model EMA as AveragedModel, SequentialLR, repeated augmentation."""
import math
import os
import random
import tempfile
import time

import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn
from torch.utils.data.dataloader import default_collate


class RASampler(torch.utils.data.Sampler):
    """Repeated augmentation: every sample turns up in several augmented versions on different ranks."""

    def __init__(self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, repetitions=3):
        self.dataset = dataset
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.epoch = 0
        self.num_samples = int(math.ceil(len(dataset) * float(repetitions) / self.num_replicas))
        self.total_size = self.num_samples * self.num_replicas
        self.num_selected_samples = int(math.floor(len(dataset) // 32 * 32 / self.num_replicas))
        self.shuffle, self.seed, self.repetitions = shuffle, seed, repetitions

    def __iter__(self):
        if self.shuffle:
            g = torch.Generator()
            g.manual_seed(self.seed + self.epoch)
            indices = torch.randperm(len(self.dataset), generator=g).tolist()
        else:
            indices = list(range(len(self.dataset)))
        indices = [ele for ele in indices for _ in range(self.repetitions)]
        indices += indices[: (self.total_size - len(indices))]
        indices = indices[self.rank : self.total_size : self.num_replicas]
        return iter(indices[: self.num_selected_samples])

    def __len__(self):
        return self.num_selected_samples

    def set_epoch(self, epoch):
        self.epoch = epoch


class RandomMixUp(nn.Module):
    def __init__(self, num_classes, alpha=0.2):
        super().__init__()
        self.num_classes, self.alpha = num_classes, alpha

    def forward(self, batch, target):
        target = nn.functional.one_hot(target, self.num_classes).float()
        lam = float(torch._sample_dirichlet(torch.tensor([self.alpha, self.alpha]))[0])
        return batch * lam + batch.roll(1, 0) * (1 - lam), target * lam + target.roll(1, 0) * (1 - lam)


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay):
        super().__init__(model, avg_fn=lambda avg, p, n: decay * avg + (1 - decay) * p, use_buffers=True)


class Shapes(torch.utils.data.Dataset):
    def __init__(self, n, seed, train):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 4, (n,), generator=g)
        self.x = 0.3 * torch.randn(n, 1, 10, 10, generator=g)
        for i, c in enumerate(self.y.tolist()):
            r, k = divmod(c, 2)
            self.x[i, 0, 5 * r : 5 * r + 5, 5 * k : 5 * k + 5] += 1
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.train:
            x = torch.roll(x, random.randint(-1, 1), dims=2)
        return x, self.y[i]


def net():
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(400, 4))


def reduce_across_processes(val):
    t = torch.tensor(val, dtype=torch.float64)
    dist.barrier()
    dist.all_reduce(t)
    return t


def train_one_epoch(model, criterion, optimizer, loader, epoch, model_ema, warmup_epochs):
    model.train()
    for i, (image, target) in enumerate(loader):
        start = time.time()
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if i % 2 == 0:
            model_ema.update_parameters(model)
            if epoch < warmup_epochs:
                model_ema.n_averaged.fill_(0)
        if i % 4 == 0 and dist.get_rank() == 0:
            print(f"Epoch: [{epoch}] {i}/{len(loader)} lr {optimizer.param_groups[0]['lr']:.4f} loss {loss.item():.4f} img/s {len(image) / (time.time() - start):.0f}")


def evaluate(model, criterion, loader, log_suffix=""):
    model.eval()
    num, correct, total = 0, 0, 0.0
    with torch.inference_mode():
        for image, target in loader:
            output = model(image)
            total += criterion(output, target).item() * len(image)
            correct += (output.argmax(1) == target).sum().item()
            num += image.shape[0]
    num, correct, total = reduce_across_processes([num, correct, total]).tolist()
    if dist.get_rank() == 0:
        if len(loader.dataset) != num:
            print(f"warning: {len(loader.dataset)} samples but {num} were used")
        print(f"Test: {log_suffix} Acc@1 {100 * correct / num:.3f} loss {total / num:.3f}")
    return correct / num


def main(epochs=4, batch_size=16, lr=0.1, warmup=1):
    dist.init_process_group("gloo")
    torch.manual_seed(5 + dist.get_rank())
    random.seed(5 + dist.get_rank())
    dataset, dataset_test = Shapes(256, 1, True), Shapes(96, 2, False)
    train_sampler = RASampler(dataset, shuffle=True, repetitions=3)
    test_sampler = torch.utils.data.distributed.DistributedSampler(dataset_test, shuffle=False)
    mixup = RandomMixUp(4)
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=train_sampler, collate_fn=lambda b: mixup(*default_collate(b)))
    loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=batch_size, sampler=test_sampler)
    model = nn.parallel.DistributedDataParallel(net())
    model_without_ddp = model.module
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    bn = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    ids = {id(p) for p in bn}
    optimizer = torch.optim.SGD([{"params": [p for p in model.parameters() if id(p) not in ids], "weight_decay": 1e-4}, {"params": bn, "weight_decay": 0.0}], lr=lr, momentum=0.9, nesterov=True)
    main_sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs - warmup)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=warmup)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers=[warm, main_sched], milestones=[warmup])
    model_ema = ExponentialMovingAverage(model_without_ddp, decay=0.9)
    out = tempfile.mkdtemp() if dist.get_rank() == 0 else None
    for epoch in range(epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, loader, epoch, model_ema, warmup)
        lr_scheduler.step()
        evaluate(model, criterion, loader_test)
        evaluate(model_ema, criterion, loader_test, "EMA")
        if dist.get_rank() == 0:
            ckpt = {"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": lr_scheduler.state_dict(), "epoch": epoch, "model_ema": model_ema.state_dict()}
            torch.save(ckpt, os.path.join(out, f"model_{epoch}.pth"))
            torch.save(ckpt, os.path.join(out, "checkpoint.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
