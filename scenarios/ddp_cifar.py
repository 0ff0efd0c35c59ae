# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "torchvision"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 300
# summary = "a small ResNet on CIFAR-shaped images under DDP, equal step by step to one process"
#
# [tool.harness.args]
# seed = "--seed {}"
# data = "--data-root {}"
# device = "--device {}"
#
# [tool.harness.reference]
# nproc = 1
# args = ["--no-bf16", "--out="]
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Train a small ResNet on CIFAR-10 with DistributedDataParallel, the way it should be done.

What it proves: N processes that share one global batch walk the loss curve of one process, to rounding. Wrong averaging, scaling or
sharding bends it. Four choices make it comparable: `--batch-size` is the *global* batch; augmentation depends on (seed, epoch, sample), not
on the rank that draws it; GroupNorm keeps no statistics of a replica; SiLU has no kink that turns a rounding error into another gradient.

How to run it bare:
    python ddp_cifar.py                                    one process, no process group
    torchrun --nproc-per-node 2 ddp_cifar.py               two processes, the same losses
    torchrun --nproc-per-node 2 ddp_cifar.py --data-root DIR --epochs 10 --out runs/a
    torchrun --nproc-per-node 2 ddp_cifar.py --data-root DIR --epochs 10 --resume runs/a/step_000312.pt
DIR holds torchvision's `cifar-10-batches-py` (fetched there by `--download`), or images as `train/<class>/*` and `test/<class>/*`. Without
it a learnable synthetic set of CIFAR's shape is made on the fly: 60 steps, some seconds on two cores.

What goes wrong in practice: `set_epoch` forgotten (one order for ever); the forward pass through `ddp.module` (replicas drift apart without
a word); a sum where DDP expects a mean; padded test samples counted twice; all ranks saving to one path; a collective under `if rank == 0`.
"""

import argparse
import math
import os
import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

CLASSES, SIDE, PAD = 10, 32, 4
IMAGE_SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CIFAR-10 under DDP", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="stop after that many optimizer steps")
    parser.add_argument("--batch-size", type=int, default=64, help="global: split over the ranks")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-root", type=Path, help="cifar-10-batches-py, or train/<class>/* and test/<class>/*; default: synthetic")
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 into --data-root through torchvision")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False, help="autocast to bfloat16")
    parser.add_argument("--out", default="", help="folder for checkpoints, one an epoch; default: none is written")
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    return parser.parse_args()


# ---- data: decoded once into uint8; 50,000 images take 150 MB, and decoding them each epoch would cost more than training this net


class Images(Dataset[tuple[Tensor, int]]):
    """Images in memory; in training cropped and flipped by a draw that depends on (seed, epoch, sample) alone, whichever rank asks."""

    def __init__(self, pixels: Tensor, labels: Tensor, augment_seed: int | None = None) -> None:
        self.pixels = pixels if augment_seed is None else F.pad(pixels, (PAD, PAD, PAD, PAD))
        self.labels = labels.tolist()
        self.augment_seed = augment_seed
        self.epoch = 0  # set by the loop; reaches the samples because the loader has no workers that would hold an old copy

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.pixels[index]
        if self.augment_seed is not None:
            draw = random.Random(f"{self.augment_seed}/{self.epoch}/{index}")
            top, left = draw.randrange(2 * PAD + 1), draw.randrange(2 * PAD + 1)
            image = image[:, top : top + SIDE, left : left + SIDE]
            image = image.flip(2) if draw.random() < 0.5 else image
        return image, self.labels[index]


def synthetic(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ten smooth patterns, shifted and buried in noise: learnable, but not within a few steps."""
    patterns = torch.randn(CLASSES, 3, 5, 5, generator=torch.Generator().manual_seed(10))
    patterns = F.interpolate(patterns, size=(SIDE, SIDE), mode="bicubic", align_corners=True)
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    shifts = torch.randint(-2, 3, (count, 2), generator=draw).tolist()
    clean = torch.stack([patterns[label].roll(shift, (1, 2)) for label, shift in zip(labels.tolist(), shifts, strict=True)])
    noisy = 128 + 32 * clean + 40 * torch.randn(clean.shape, generator=draw)
    return noisy.clamp(0, 255).to(torch.uint8), labels


def image_folder(folder: Path, classes: list[str]) -> tuple[Tensor, Tensor]:
    from PIL import Image

    pixels, labels = bytearray(), []
    for label, name in enumerate(classes):
        for path in sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in IMAGE_SUFFIXES):
            try:
                with Image.open(path) as image:
                    pixels += image.convert("RGB").resize((SIDE, SIDE)).tobytes()
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                raise ValueError(f"{path} does not decode as an image ({error}); copy it again or remove it") from error
            labels.append(label)
    if not labels:
        raise ValueError(f"{folder} holds no images")
    return torch.frombuffer(pixels, dtype=torch.uint8).view(-1, SIDE, SIDE, 3).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def cifar10(root: Path, train: bool, download: bool = False) -> tuple[Tensor, Tensor]:
    from torchvision.datasets import CIFAR10  # 2-4 s of import, paid only by who reads the real set

    raw = CIFAR10(str(root), train=train, download=download)
    return torch.from_numpy(raw.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(raw.targets)


def load_data(root: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    if root is None:
        return synthetic(1280, seed=1), synthetic(501, seed=2)
    root = root.parent if root.name == "cifar-10-batches-py" else root
    if (root / "cifar-10-batches-py").is_dir():
        return cifar10(root, train=True), cifar10(root, train=False)
    if not (root / "train").is_dir() or not (root / "test").is_dir():
        raise ValueError(f"{root} holds neither cifar-10-batches-py nor train/<class>/* and test/<class>/*")
    classes, in_test = (sorted(entry.name for entry in (root / part).iterdir() if entry.is_dir()) for part in ("train", "test"))
    if classes != in_test or len(classes) > CLASSES:
        raise ValueError(f"{root}: train has the classes {classes}, test has {in_test}; they must agree and be {CLASSES} at most")
    return image_folder(root / "train", classes), image_folder(root / "test", classes)


# ---- model: GroupNorm, because BatchNorm's statistics would be those of a replica's share of the batch


class Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, num_out)
        self.skip = nn.Identity() if stride == 1 and num_in == num_out else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x)))))
        return F.silu(inner + self.skip(x))


def small_resnet() -> nn.Module:
    stem = nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.GroupNorm(4, 24), nn.SiLU()  # stride 2: a quarter of the cost, for two CPU cores
    blocks = Block(24, 24, 1), Block(24, 48, 2), Block(48, 96, 2)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, CLASSES))


def as_input(pixels: Tensor, device: torch.device) -> Tensor:
    return (pixels.to(device, non_blocking=True).float() - 120.0) / 64.0  # about CIFAR's own mean and spread


# ---- the process group, and what needs it


def choose_device(wanted: str, local_rank: int, local_world_size: int) -> torch.device:
    """One GPU a process, else the CPU; a launcher may also show each process one GPU of its own, as number 0."""
    num_gpus = torch.cuda.device_count()
    own_gpu = num_gpus == 1 < local_world_size and "CUDA_VISIBLE_DEVICES" in os.environ
    enough = own_gpu or num_gpus >= local_world_size
    if wanted == "cuda" and not enough:
        raise ValueError(f"--device cuda: {local_world_size} ranks on this node, {num_gpus} GPUs")
    if wanted == "cpu" or not enough:
        return torch.device("cpu")
    device = torch.device("cuda", 0 if own_gpu else local_rank)
    torch.cuda.set_device(device)  # before anything touches CUDA, or every rank leaves a context on GPU 0
    torch.backends.cudnn.allow_tf32 = False  # TF32 convolutions would end the comparison with one process at three digits
    return device


def sum_over_ranks(values: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


@torch.no_grad()
def evaluate(net: nn.Module, test_set: Images, rank: int, world_size: int, device: torch.device) -> tuple[float, float]:
    """Loss and accuracy over the whole test set; DistributedSampler would pad it to a multiple of the ranks and count some images twice."""
    shard = Subset(test_set, range(rank, len(test_set), world_size))
    totals = torch.zeros(3, dtype=torch.float64)
    net.eval()
    for pixels, labels in DataLoader(shard, batch_size=128):
        logits = net(as_input(pixels, device)).float().cpu()
        loss_sum = F.cross_entropy(logits, labels, reduction="sum")
        totals += torch.tensor([loss_sum, (logits.argmax(1) == labels).sum(), len(labels)], dtype=torch.float64)
    net.train()
    loss, correct, seen = sum_over_ranks(totals.to(device)).tolist()
    assert seen == len(test_set), f"evaluated {seen:.0f} images of a test set of {len(test_set)}"
    return loss / seen, correct / seen


def save(path: Path, step: int, parts: dict[str, Any]) -> None:
    """For one rank to call; the unwrapped module's keys load with and without DDP, and a crash leaves the last good file in place."""
    torch.save({"step": step} | {name: part.state_dict() for name, part in parts.items()}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def resume(path: Path, parts: dict[str, Any], device: torch.device) -> int:
    """For every rank to call, each onto its own device. The step alone says where the sampler stands and what augmentation draws next."""
    state = torch.load(path, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])


def main() -> None:
    args = parse_arguments()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    distributed = "RANK" in os.environ  # a launcher set it; plain python has no process group
    try:
        device = choose_device(args.device, local_rank, local_world_size)
        if args.download and local_rank == 0:
            cifar10(args.data_root or Path(), train=True, download=True)  # once a node, while the others wait below
        if distributed:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
            dist.barrier()
        train_data, test_data = load_data(args.data_root)
        if args.batch_size % world_size or args.batch_size > len(train_data[1]):
            raise ValueError(f"--batch-size {args.batch_size} must divide by {world_size} ranks and fit {len(train_data[1])} images")
        if args.out:
            Path(args.out).mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"ddp_cifar: {error}" if rank == 0 else 1)

    train_set, test_set = Images(*train_data, augment_seed=args.seed), Images(*test_data)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    net = small_resnet().to(device)  # moved before it is wrapped and before the optimizer sees it
    model = DistributedDataParallel(net, [device.index] if device.type == "cuda" else None) if distributed else net
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    num_steps = min(args.steps, args.epochs * len(loader))
    warm_up = 1 + num_steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * done / num_steps))
    )
    parts = {"model": net, "optimizer": optimizer, "schedule": schedule}
    step = resume(args.resume, parts, device) if args.resume else 0

    recent = torch.zeros(2, device=device)  # sum of losses and number of steps since the last line
    while step < num_steps:
        epoch, done_in_epoch = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        train_set.epoch = epoch
        for pixels, labels in islice(loader, done_in_epoch, None):
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = F.cross_entropy(model(as_input(pixels, device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)  # DDP has averaged by now, so every rank clips by the same norm
            optimizer.step()
            schedule.step()
            step += 1
            recent += torch.stack([loss.detach(), torch.ones_like(loss)])
            if step % args.log_every == 0:
                loss_sum, count = sum_over_ranks(recent).tolist()  # every rank joins, rank 0 prints
                if rank == 0:
                    print(f"step {step:5d}  loss {loss_sum / count:.7f}  lr {schedule.get_last_lr()[0]:.4f}", flush=True)
                recent.zero_()
            if step == num_steps:
                break
        test_loss, accuracy = evaluate(net, test_set, rank, world_size, device)
        if rank == 0:
            print(f"epoch {epoch}  test loss {test_loss:.4f}  test accuracy {100 * accuracy:.1f} %  ({len(test_set)} images)", flush=True)
            if args.out:  # no barrier: no rank reads it in this run
                save(Path(args.out) / f"step_{step:06d}.pt", step, parts)

    # Here and not in a `finally`: a rank that fails must not tear the group down, or its peers report a lost connection as the cause.
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
