"""What became of the output of a reduce_scatter before parameters are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.probe import flatshards
from harness.probe.state import S

FILL, GATHER = "reduce_scatter_single", "all_gather_single"
SITE = ("train.py", 3, "step")


class Told:
    """Stands for the recorder."""

    disabled = False

    def __init__(self) -> None:
        self.scales: list[Any] = []

    def event(self, kind: str, site: Any, **fields: Any) -> None:
        self.scales += [(fields["opt"], scale[1]) for scale in fields["scales"]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    recorder = Told()
    monkeypatch.setattr(S, "recorder", recorder)
    monkeypatch.setattr(S, "busy", False)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(flatshards, "_open", [])
    monkeypatch.setattr(flatshards, "measured", lambda *site: site)
    monkeypatch.setattr(S.since, "num_backward", 1)
    yield recorder


def _filled(*parts: torch.Tensor) -> None:
    for part in parts:
        flatshards.settle(FILL, (part,))
        flatshards.note(FILL, (part, torch.zeros(2 * part.numel())), {}, SITE)


def test_parts_are_told_when_parameters_are_gathered(told: Told) -> None:
    one, other = torch.randn(40), torch.randn(40)
    _filled(one, other)
    one.div_(2).mul_(0.5)
    flatshards.settle(GATHER, (torch.zeros(80), torch.randn(40)))
    assert [opt for opt, _ in told.scales] == [-1, -2] and [factor for _, factor in told.scales] == pytest.approx([0.25, 1.0])
    flatshards.settle(GATHER, (torch.zeros(80), torch.randn(40)))
    assert len(told.scales) == 2


def test_a_part_is_told_when_it_is_filled_again(told: Told) -> None:
    part = torch.randn(40)
    _filled(part)
    part.mul_(0.5)
    _filled(part)
    assert [factor for _, factor in told.scales] == pytest.approx([0.5])


def test_what_is_gathered_as_it_is_is_no_part_to_step_with(told: Told) -> None:
    part = torch.randn(40)
    _filled(part)
    part.div_(part.abs().max())
    flatshards.settle(GATHER, (torch.zeros(80), part))
    assert told.scales == [] and flatshards._open == []


def test_sums_of_no_gradients_and_counts_are_let_be(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of features, or of an expert's gradients over its tokens: no norm is taken, and no backward came before."""
    part = torch.randn(40)
    for name, value in (("measured", lambda *site: None), ("measured", lambda *site: site)):
        monkeypatch.setattr(flatshards, name, value)
        _filled(part)
        part.div_(3)
        flatshards.settle(GATHER, (torch.zeros(80), torch.randn(40)))
        monkeypatch.setattr(S.since, "num_backward", 0)
    assert told.scales == []


def test_rows_and_what_is_gone_are_let_be(told: Told) -> None:
    rows = torch.randn(4, 10)
    _filled(rows, torch.randn(40))
    rows.mul_(0.5)
    flatshards.settle(GATHER, (torch.zeros(80), torch.randn(40)))
    assert told.scales == []


def test_where_the_norm_is_taken(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    body = ["old = part.norm()", "reduce(part, flat)", "part.div_(2)", "norm = part.norm().item()", "return old, norm"]
    script.write_text("\n    ".join(["def step(part, flat):", *body]))
    assert flatshards.measured(str(script), 3, "step") == (str(script), 5, "step")
    assert flatshards.measured(str(script), 5, "step") is None
