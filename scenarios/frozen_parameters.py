# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "fine-tuning: freeze before wrapping, wrap again after unfreezing, no parameter without a gradient"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Frozen and unused parameters under DDP: what is trained is decided before wrapping, and decided again by wrapping again.

What it proves: frozen parameters stay as they were, to the last bit, and every trainable one moves; after unfreezing, a new wrapper and
an optimizer with a group for the new parameters train them too, and the replicas stay equal; every parameter that DDP waits for gets a
gradient in every step.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 frozen_parameters.py
    python frozen_parameters.py                            a world of one, the same code

What goes wrong in practice: DDP takes note, once, of the parameters that need a gradient. Unfreeze one later and it is trained but never
averaged (silent: replicas drift apart); freeze one later and DDP waits for it (an error one step late that names neither); add a head
later and it is neither sent to the other ranks nor averaged; leave a head out of the loss and the second step fails, or, with
`find_unused_parameters`, every step pays for a search; train a module that was never wrapped; build the optimizer from a copy.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES = 16, 4


def start(device_option: str) -> torch.device:
    """Join the job that torchrun made, or be a job of one under plain `python`. NCCL needs a GPU for each rank; else gloo on the CPU."""
    local_rank, local_world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    enough_gpus = torch.cuda.device_count() >= local_world_size
    if device_option == "cuda" and not enough_gpus:
        raise SystemExit(f"--device cuda: {local_world_size} ranks on this node, {torch.cuda.device_count()} GPUs")
    device = torch.device("cuda", local_rank) if enough_gpus and device_option != "cpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def samples(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.view(count, CLASSES, -1).sum(2).argmax(1))


class Net(nn.Module):
    """A backbone that stands for a pretrained one, a new head, and a second head halfway up that helps in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.head = nn.Linear(48, CLASSES)
        self.early_head = nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        halfway = self.backbone[:2](x)
        return self.head(self.backbone[2:](halfway)), self.early_head(halfway)


def wrap(net: nn.Module, device: torch.device) -> DistributedDataParallel:
    return DistributedDataParallel(net, [device.index] if device.type == "cuda" else None)


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def check_moved(net: nn.Module, before: dict[str, Tensor]) -> None:
    """Frozen parameters are bit by bit what they were; trained ones are not."""
    for name, parameter in net.named_parameters():
        change = float((parameter.detach() - before[name]).abs().max())
        if parameter.requires_grad:
            assert change > 0.0, f"{name} is trainable and moved by {change}, expected more than 0"
        else:
            assert change == 0.0, f"{name} is frozen and moved by {change}, expected 0"


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, ...]],
    sampler: DistributedSampler[tuple[Tensor, ...]],
    epochs: range,
) -> list[float]:
    device = next(model.parameters()).device
    losses = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros((), device=device)
        for x, y in loader:
            y = y.to(device)
            out, early = model(x.to(device))
            loss = F.cross_entropy(out, y) + 0.3 * F.cross_entropy(early, y)  # both heads, or DDP waits for the one left out
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        losses.append(loss_sum.item() / len(loader) / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="frozen parameters under DDP", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each of the two phases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    device = start(args.device)
    world_size = dist.get_world_size()

    data = samples(160 * world_size, args.seed)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(data, batch_size=20, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed)
    net = Net().to(device)

    # Phase 1: the heads alone. Frozen before wrapping; the optimizer never sees the rest, which weight decay would move without a gradient.
    net.backbone.requires_grad_(False)
    model = wrap(net, device)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=1e-4)
    before = snapshot(net)
    losses = train(model, optimizer, loader, sampler, range(args.epochs))
    check_moved(net, before)

    # Phase 2: all of it. A new wrapper, because the old one never looks again; the heads keep their momentum, the backbone learns slower.
    del model
    net.backbone.requires_grad_(True)
    model = wrap(net, device)
    optimizer.add_param_group({"params": list(net.backbone.parameters()), "lr": 0.05})
    before = snapshot(net)
    losses += train(model, optimizer, loader, sampler, range(args.epochs, 2 * args.epochs))
    check_moved(net, before)

    assert losses[-1] < losses[0], f"the loss must fall: {losses[0]:.4f} in epoch 0, {losses[-1]:.4f} at the end"

    dist.destroy_process_group()  # not in a `finally`: a failing rank must not make its peers report a lost connection first


if __name__ == "__main__":
    main()
