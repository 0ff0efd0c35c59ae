"""Makes torch raise its well-known errors, one after the other, in one process without a launcher; prints one JSON line for each."""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


class Twice(nn.Module):
    """One layer in two re-entrant checkpoints: its gradient is ready twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return checkpoint(self.layer, x, use_reentrant=True) + checkpoint(self.layer, x, use_reentrant=True)


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(1, 1), nn.Linear(1, 1), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.first(x) + (self.second(x) if self.calls > 1 else 0)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


def sgd(*models: nn.Module) -> optim.SGD:
    return optim.SGD([{"params": list(m.parameters())} for m in models], lr=0.1)


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def trained(model: nn.Module, steps: int = 2, **wrapped: Any) -> None:
    ddp = DistributedDataParallel(model, **wrapped)
    for _ in range(steps):
        ddp(ones(2, 1)).sum().backward()


def scaled_twice() -> None:
    model = nn.Linear(1, 1)
    scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(model)
    scaler.scale(model(ones(1, 1)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def scaled_never() -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(nn.Linear(1, 1))
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)


def without(variable: str) -> None:
    value = os.environ.pop(variable)
    dist.destroy_process_group()
    try:
        dist.init_process_group("gloo")
    finally:
        os.environ[variable] = value
        dist.init_process_group("gloo")


def second_backward() -> None:
    loss = (ones(2) ** 2).sum()
    loss.backward()
    loss.backward()


def written_in_place() -> None:
    y = ones(2).exp()
    y += 1
    y.sum().backward()


def leaf_written() -> None:
    x = ones(2)
    x += 1


def inference() -> None:
    with torch.inference_mode():
        x = torch.ones(1)
    (x * ones(1)).sum().backward()


def used_up() -> None:
    parameters = nn.Linear(1, 1).parameters()
    print(end="".join("" for _ in parameters))
    optim.SGD(parameters, lr=0.1)


def in_two_groups() -> None:
    layer = nn.Linear(1, 1)
    optim.SGD([{"params": layer.parameters()}, {"params": [layer.weight]}], lr=0.1)


def too_many_steps() -> None:
    schedule = OneCycleLR(sgd(nn.Linear(1, 1)), max_lr=1, total_steps=2)
    for _ in range(3):
        schedule.step()


def sharded() -> Any:
    model: Any = nn.Linear(2, 2)
    fully_shard(model)
    return model.weight + torch.ones(2, 2)


ERRORS: list[Callable[[], object]] = [
    lambda: ForkingPickler.dumps(lambda: 0),
    lambda: ForkingPickler.dumps(ones(1) * 2),
    lambda: without("RANK"),
    lambda: os.environ["LOCAL_RANK"],
    lambda: dist.new_group(backend="nccl"),
    lambda: dist.gather(torch.ones(1), dst=0),
    lambda: dist.broadcast(torch.ones(1), src=3),
    lambda: dist.broadcast(torch.ones(1), src=1, group=dist.new_group([0])),
    lambda: dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1)),
    sharded,
    lambda: trained(Twice()),
    lambda: trained(Changing(), static_graph=True),
    lambda: trained(Unused()),
    lambda: DistributedDataParallel(nn.ReLU()),
    lambda: DistributedDataParallel(nn.Linear(1, 1)).in_features,
    lambda: nn.Linear(1, 1).no_sync(),  # type: ignore[operator]
    lambda: trained(nn.SyncBatchNorm(1)),
    lambda: DistributedSampler([1], 2, 5),  # type: ignore[arg-type]
    lambda: DataLoader([1], shuffle=True, sampler=SequentialSampler([1])),  # type: ignore[arg-type]
    lambda: DataLoader([1], batch_size=4, batch_sampler=BatchSampler(SequentialSampler([1]), 1, False)),  # type: ignore[arg-type]
    lambda: DataLoader(Stream(), shuffle=True),
    lambda: DataLoader(Stream(), sampler=SequentialSampler([1])),
    lambda: SequentialSampler([1]).set_epoch(1),  # type: ignore[attr-defined]
    lambda: nn.BatchNorm1d(2)(torch.ones(1, 2)),
    lambda: torch.ones(1).to("cuda"),
    lambda: torch.load(saved(torch.ones(1)), map_location="cuda:0"),
    written_in_place,
    second_backward,
    lambda: torch.ones(1).sum().backward(),
    lambda: ones(2).backward(),
    leaf_written,
    inference,
    used_up,
    in_two_groups,
    lambda: sgd(nn.Linear(1, 1)).load_state_dict(sgd(nn.Linear(1, 1), nn.Linear(1, 1)).state_dict()),
    scaled_twice,
    scaled_never,
    too_many_steps,
    lambda: torch.load(saved({"args": argparse.Namespace(lr=1)}), weights_only=True),
    lambda: copy.deepcopy(ones(1) * 2),
]


def main() -> None:
    dist.init_process_group("gloo")
    for position, provoke in enumerate(ERRORS):
        try:
            provoke()
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps({"position": position, "said": said}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
