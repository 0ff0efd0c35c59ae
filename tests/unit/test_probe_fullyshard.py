"""FSDP2's two tensors of a parameter: the shard is the module's own, also while the gathered one stands in its place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.probe import names


@pytest.fixture
def model(tmp_path: Any) -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inner = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(inner[1], mesh=mesh)
        made: Any = fully_shard(inner, mesh=mesh)
        for module in made.modules():
            names.note_module(module)
        yield made
    finally:
        dist.destroy_process_group()
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(key)


def test_shards_are_owned_while_they_are_gathered_and_gathered_ones_are_known(model: Any) -> None:
    shards = list(model.parameters())
    whole_names = [n for n, _ in model.named_parameters()]
    with torch.no_grad():
        model(torch.randn(3, 4))
    held = list(model.parameters())
    stands_in = [name for name, p, shard in zip(whole_names, held, shards, strict=True) if p is not shard]
    assert stands_in == ["0.weight", "0.bias", "2.weight", "2.bias"]  # the root's stay gathered, the inner module's do not

    known = names.Known([{"params": shards}])
    assert known.names == whole_names and all(known.owned)
    assert names.gathered(shards) == [] and names.gathered(held) == stands_in
    model.reshard()
    assert names.gathered(held) == stands_in and names.gathered(list(model.parameters())) == []
    late = names.Known([{"params": held}])
    assert [o for o, p, s in zip(late.owned, held, shards, strict=True) if p is not s] == [False] * 4


def test_a_plain_model_has_none() -> None:
    plain = nn.Linear(2, 2)
    names.note_module(plain)
    assert names.gathered(list(plain.parameters())) == [] and names.Known([{"params": list(plain.parameters())}]).owned == [True, True]
