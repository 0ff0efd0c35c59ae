# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "equal where ranks must agree, different where they must not, and the same again tomorrow"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Seeds: which random numbers all ranks must share, which none may share, and a run that can be repeated bit by bit.

What it proves: the split into training and validation and the initial weights come from one seed on all ranks; the noise that augments
the samples and the dropout masks come from a seed of each rank; so do the seeds of loader workers. Two runs with one seed give the same
losses to the last bit; another seed gives others.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 seeds.py
    python seeds.py                                        a world of one, the same code

What goes wrong in practice: one `manual_seed` for everything, so that every rank draws the same noise and N ranks see 1/N of the variety;
a seed of each rank for everything, so that `random_split` differs (one rank trains on another's validation samples), the sampler's shares
overlap, and weights that DDP does not own (a frozen projection, an `apply(init)` after wrapping) differ from the start; the order of a
set or of `hash()`, which differs by process; a generator that belongs to the dataset and is copied, in one state, into every worker.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset, random_split

FEATURES, CLASSES = 12, 4


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


def samples(names: list[str], seed: int) -> TensorDataset:
    """The samples that the names stand for, in the order of the list."""
    numbers = [int(name.removeprefix("sample_")) for name in names]
    x = torch.randn(len(names), FEATURES, generator=torch.Generator().manual_seed(seed))[numbers]
    return TensorDataset(x, x.view(len(names), CLASSES, -1).sum(2).argmax(1))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augmentation by torch's global generator: each rank seeds its own, the loader seeds each worker's from it."""

    def __init__(self, data: Subset[tuple[Tensor, ...]]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(FEATURES), y


class Net(nn.Module):
    """Random features, fixed for good, in front of a trained head. The projection is part of what DDP wraps: rank 0's is sent to all."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(FEATURES, 64).requires_grad_(False)
        self.head = nn.Sequential(nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.projection(x))
        return out


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)


def gather(value: Tensor) -> list[Tensor]:
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return values


def check_own_noise(device: torch.device) -> None:
    """What the next draws would be, without drawing: the generator's seed, which must be each rank's own."""
    seeds = [int(value) for value in gather(torch.tensor(torch.initial_seed(), device=device))]
    assert len(set(seeds)) == len(seeds), f"{len(set(seeds))} different seeds on {len(seeds)} ranks: {seeds}"


def train(seed: int, epochs: int, device: torch.device) -> list[float]:
    """One run from scratch; the global mean loss of each epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = sorted({f"sample_{number:04d}" for number in range(320)})  # sorted: a set's order differs from process to process
    data = samples(names, seed)
    training, validation = random_split(data, [256, 64], generator=torch.Generator().manual_seed(seed))
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(Noisy(training), shuffle=True, seed=seed, drop_last=True)
    loader = DataLoader(Noisy(training), batch_size=64 // world_size, sampler=sampler, drop_last=True)

    torch.manual_seed(seed)  # the same on all ranks: equal weights, also where DDP does not look
    net = Net()
    net.apply(init_weights)
    model = DistributedDataParallel(net.to(device), [device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1000 * seed + rank)  # from here on a seed of each rank, for noise and dropout

    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        loss_sum = torch.zeros((), device=device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        losses.append(loss_sum.item() / len(loader) / world_size)
    losses.append(validate(net, validation, device))
    return losses


@torch.no_grad()
def validate(net: nn.Module, data: Subset[tuple[Tensor, ...]], device: torch.device) -> float:
    totals = torch.zeros(2, device=device)
    net.eval()
    for x, y in DataLoader(Subset(data, range(dist.get_rank(), len(data), dist.get_world_size())), batch_size=32):
        totals += torch.stack([F.cross_entropy(net(x.to(device)), y.to(device), reduction="sum"), torch.tensor(len(y), device=device)])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="seeds", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    device = start(args.device)
    rank = dist.get_rank()

    torch.manual_seed(1000 * args.seed + rank)
    check_own_noise(device)
    first = train(args.seed, args.epochs, device)
    again = train(args.seed, args.epochs, device)
    assert first == again, f"the same seed must give the same run: {first[-1]!r}, then {again[-1]!r}"
    other = train(args.seed + 1, args.epochs, device)
    assert first != other, f"another seed must give another run: {first[-1]!r} and {other[-1]!r} from {args.seed} and {args.seed + 1}"
    assert args.epochs < 3 or first[-2] < first[0], f"the loss must fall: {first[0]:.4f} in epoch 0, {first[-2]:.4f} at the end"
    if rank == 0:
        print(f"seed {args.seed}: loss {first[0]:.4f} to {first[-2]:.4f}, twice the same; validation {first[-1]:.4f}", flush=True)
        print(f"seed {args.seed + 1}: loss {other[0]:.4f} to {other[-2]:.4f}; validation {other[-1]:.4f}", flush=True)

    dist.destroy_process_group()  # not in a `finally`: a failing rank must not make its peers report a lost connection first


if __name__ == "__main__":
    main()
