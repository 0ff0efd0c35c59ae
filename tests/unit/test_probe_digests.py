"""Tensors are read where they lie: the bits that torch itself would give, and nothing of what has no memory."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
import torch

from harness.probe import datasets, digests

TENSORS: dict[str, Any] = {
    "small": torch.randn(3),
    "scalar": torch.tensor(3.0),
    "large": torch.randn(1000, 33),
    "channels last": torch.randn(64, 3, 7, 7).to(memory_format=torch.channels_last),
    "transposed": torch.randn(10, 10).t(),
    "strided": torch.randn(100)[::2],
    "expanded": torch.randn(4, 1).expand(4, 5),
    "a part": torch.randn(20, 20)[3:, 4:],
    "whole numbers": torch.arange(100),
    "truths": torch.rand(70) > 0.5,
    "half": torch.randn(60).half(),
    "bfloat16": torch.randn(300).bfloat16(),
    "float8": torch.randn(60).to(torch.float8_e4m3fn),
    "negated lazily": torch.randn(90, dtype=torch.complex64).conj().imag,
    "parameter": torch.nn.Parameter(torch.randn(49)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_bits_are_those_of_the_sampled_view(name: str) -> None:
    tensor = TENSORS[name]
    wanted = digests.to_bytes(digests.sampled(tensor).detach().resolve_neg())
    assert digests.of_tensors([tensor])[1] == [crc32(wanted)]
    assert digests.of_tensors([None, tensor, *TENSORS.values()])[1][:2] == [0, crc32(wanted)]
    assert digests.of_tensors([tensor, tensor], lasting=False)[1] == [crc32(wanted)] * 2  # as a gradient is read
    assert digests.bits(tensor) in (None, wanted)


@pytest.mark.parametrize(("values", "wanted"), [
    (torch.zeros(100), False), (-torch.zeros(30), False), (-torch.zeros(60).bfloat16(), False), (torch.zeros(3, dtype=torch.long), False),
    (torch.full((5,), float("nan")), True), (torch.tensor([1e-45]), True), (torch.tensor([-1]), True), (torch.tensor([False, True]), True),
])  # fmt: skip
def test_minus_zero_is_zero(values: Any, wanted: bool) -> None:
    assert digests.any_sampled(values) is wanted


def test_what_has_no_memory_has_no_digest() -> None:
    given_back = torch.randn(100)
    part = given_back[3:]
    given_back.untyped_storage().resize_(0)
    shrunk = torch.randn(100)
    shrunk.untyped_storage().resize_(40)
    assert digests.of_tensors([given_back, part], lasting=False)[1] == [0, 0]
    none: list[Any] = [given_back, part, shrunk, None, torch.zeros(0), torch.randn(2, device="meta"), torch.randn(3, dtype=torch.complex64)]
    assert digests.of_tensors(none)[1] == [0] * len(none)


def test_nothing_reads_memory_that_was_given_back() -> None:
    kept, given_back, shrunk = torch.randn(100), torch.nn.Parameter(torch.randn(20, 100)), torch.randn(100)
    part = given_back.detach()[2:]
    rotation = digests.Rotation([kept, given_back, shrunk])
    alone = digests.Rotation([kept]).digest([kept], 0)
    given_back.untyped_storage().resize_(0)
    shrunk.untyped_storage().resize_(40)
    for lost in (given_back, shrunk, part, given_back.detach().view(-1)):
        assert not digests.has_memory(lost) and digests.plain(lost)
        assert digests.sampled(lost).tolist() == [] and not digests.any_sampled(lost)
        assert digests.full(lost) == 0 and digests.to_bytes(lost) == b"" and digests.of_rows(lost) == [] == datasets.row_digests(lost)
    assert rotation.digest([kept, given_back, shrunk], 0) >> 32 == alone >> 32
    assert digests.has_memory(kept) and digests.has_memory(kept[::3]) and not digests.has_memory(given_back)


def test_a_place_that_was_read_before_is_read_again_as_it_is_now() -> None:
    digests._samples.clear()
    tensor = torch.arange(200.0)
    first = digests.of_tensors([tensor])[1]
    assert digests.of_tensors([tensor])[1] == first
    tensor[0] = 7.0
    assert digests.of_tensors([tensor])[1] != first  # the same address, other numbers
    part, turned = tensor[:100], tensor.view(20, 10).t()
    assert digests.of_tensors([part])[1] == digests.of_tensors([part.clone()])[1]  # the same address, fewer elements
    assert digests.of_tensors([turned])[1] == digests.of_tensors([tensor.clone().view(20, 10).t()])[1]  # the same address, another order
    assert digests.of_tensors([tensor.view(torch.int32)])[1] == digests.of_tensors([tensor.clone().view(torch.int32)])[1]
    tensor.untyped_storage().resize_(0)
    assert digests.of_tensors([tensor])[1] == [0]


def test_slices_are_the_same_wherever_they_are_read() -> None:
    tensors = [torch.randn(3000), torch.randn(40_000), torch.randn(7, 5).bfloat16()]
    rotation = digests.Rotation(tensors)
    direct = [rotation.digest(tensors, step) for step in range(len(rotation.slices))]
    expected = []
    for chosen in rotation.slices:
        value = 0
        for i, start, num in chosen:
            value = digests.crc32(digests.to_bytes(tensors[i].flatten()[start : start + num]), value)
        expected.append(value << 32 | len(chosen))
    assert direct == expected and len(direct) > 1


@pytest.mark.parametrize("now", [torch.zeros(3), torch.zeros(20_000, device="meta"), torch.zeros(0), torch.zeros(20_000).to_sparse()], ids=str)
def test_a_slice_of_what_is_not_there_any_more_is_left_out(now: Any) -> None:
    rotation = digests.Rotation([torch.randn(20_000), torch.randn(10)])
    before = [rotation.digest([torch.ones(20_000), torch.ones(10)], step) for step in range(2)]
    after = [rotation.digest([now, torch.ones(10)], step) for step in range(2)]
    assert all(a != b for a, b in zip(before, after, strict=True))
