"""CLIP training after mlfoundations/open_clip: local loss on features gathered with gradient, logit scale clamped after each step."""
import argparse
import logging
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def gather_features(image_features, text_features, local_loss, gather_with_grad, rank, world_size):
    if gather_with_grad:
        all_i = torch.cat(torch.distributed.nn.all_gather(image_features), dim=0)
        all_t = torch.cat(torch.distributed.nn.all_gather(text_features), dim=0)
    else:
        gi = [torch.zeros_like(image_features) for _ in range(world_size)]
        gt = [torch.zeros_like(text_features) for _ in range(world_size)]
        dist.all_gather(gi, image_features)
        dist.all_gather(gt, text_features)
        if not local_loss:
            gi[rank], gt[rank] = image_features, text_features
        all_i, all_t = torch.cat(gi), torch.cat(gt)
    return all_i, all_t


class ClipLoss(nn.Module):
    def __init__(self, local_loss=True, gather_with_grad=True, cache_labels=True, rank=0, world_size=1):
        super().__init__()
        self.local_loss, self.gather_with_grad, self.cache_labels = local_loss, gather_with_grad, cache_labels
        self.rank, self.world_size = rank, world_size
        self.prev_num_logits, self.labels = 0, {}

    def get_ground_truth(self, n):
        if self.prev_num_logits != n or "cpu" not in self.labels:
            labels = torch.arange(n)
            if self.world_size > 1 and self.local_loss:
                labels = labels + n * self.rank
            if self.cache_labels:
                self.labels["cpu"] = labels
                self.prev_num_logits = n
        else:
            labels = self.labels["cpu"]
        return labels

    def forward(self, image_features, text_features, logit_scale):
        all_i, all_t = gather_features(image_features, text_features, self.local_loss, self.gather_with_grad, self.rank, self.world_size)
        if self.local_loss:
            li, lt = logit_scale * image_features @ all_t.T, logit_scale * text_features @ all_i.T
        else:
            li = logit_scale * all_i @ all_t.T
            lt = li.T
        labels = self.get_ground_truth(li.shape[0])
        return (F.cross_entropy(li, labels) + F.cross_entropy(lt, labels)) / 2


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(256, 24))
        self.token = nn.EmbeddingBag(40, 32)
        self.text_projection = nn.Linear(32, 24)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        return F.normalize(self.visual(image), dim=-1), F.normalize(self.text_projection(self.token(text)), dim=-1), self.logit_scale.exp()


def unwrap_model(model):
    return model.module if hasattr(model, "module") else model


class AverageMeter:
    def __init__(self):
        self.sum = self.count = self.avg = self.val = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def cosine_lr(optimizer, base_lr, warmup_length, steps):
    def _lr_adjuster(step):
        if step < warmup_length:
            lr = base_lr * (step + 1) / warmup_length
        else:
            e, es = step - warmup_length, steps - warmup_length
            lr = 0.5 * (1 + math.cos(math.pi * e / es)) * base_lr
        for g in optimizer.param_groups:
            g["lr"] = lr
        return lr
    return _lr_adjuster


def pairs(n, seed):
    g = torch.Generator().manual_seed(99)
    proto = torch.randn(40, 3, 8, 8, generator=g)
    h = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 40, (n, 3), generator=h)
    return TensorDataset(proto[text].mean(1) + 0.1 * torch.randn(n, 3, 8, 8, generator=h), text)


def evaluate(model, val, epoch):
    if dist.get_rank() != 0:
        return
    unwrapped = unwrap_model(model)
    unwrapped.eval()
    with torch.no_grad():
        i, t, s = unwrapped(*val.tensors)
        ranks = (s * i @ t.T).argsort(1, descending=True) == torch.arange(len(i))[:, None]
        logging.info("Eval Epoch: %d R@1: %.3f", epoch, ranks[:, 0].float().mean().item())
    unwrapped.train()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=24)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--wd", type=float, default=0.2)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(asctime)s | %(message)s")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(CLIP())
    exclude = lambda n, q: q.ndim < 2 or "logit_scale" in n
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [q for n, q in named if exclude(n, q)], "weight_decay": 0.0}, {"params": [q for n, q in named if not exclude(n, q)], "weight_decay": args.wd}], lr=args.lr, betas=(0.9, 0.98), eps=1e-6)
    data = pairs(384, 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    scheduler = cosine_lr(optimizer, args.lr, 5, len(loader) * args.epochs)
    loss_fn = ClipLoss(rank=rank, world_size=world_size)
    val = pairs(64, 2)
    evaluate(model, val, 0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        loss_m = AverageMeter()
        for i, (images, texts) in enumerate(loader):
            scheduler(epoch * len(loader) + i)
            optimizer.zero_grad()
            total_loss = loss_fn(*model(images, texts))
            total_loss.backward()
            optimizer.step()
            with torch.no_grad():
                unwrap_model(model).logit_scale.clamp_(0, math.log(100))
            if rank == 0 and (i % 4 == 0 or i + 1 == len(loader)):
                loss_m.update(total_loss.item(), len(images))
                logging.info("Train Epoch: %d [%d/%d] Loss: %.4f (%.4f) Logit Scale: %.3f", epoch, (i + 1) * args.batch_size * world_size, len(data), loss_m.val, loss_m.avg, unwrap_model(model).logit_scale.exp().item())
        evaluate(model, val, epoch + 1)
        if rank == 0:
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, f"/tmp/clip_{os.getpid()}_epoch_latest.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
