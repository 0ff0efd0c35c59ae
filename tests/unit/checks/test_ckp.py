"""CKP101-CKP122 on small runs."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, recording, row, run, site

from harness.checks.ckp import keys
from harness.checks.ckp.alias import AliasForCopy
from harness.checks.ckp.all_ranks_save import AllRanksSaveSamePath
from harness.checks.ckp.best_forgotten import BestForgotten
from harness.checks.ckp.blank_statistics import BlankStatistics
from harness.checks.ckp.by_position import OptimizerStateByPosition
from harness.checks.ckp.foreign_state import ForeignStateRestored
from harness.checks.ckp.latest_by_name import LatestByName
from harness.checks.ckp.load_before_written import LoadBeforeWriteDone
from harness.checks.ckp.loaded_into_nothing import LoadedIntoNothing
from harness.checks.ckp.loads_differ import RanksLoadDifferentWeights
from harness.checks.ckp.map_location import MapLocationMissing
from harness.checks.ckp.one_rank_resumes import ResumeOnOneRank
from harness.checks.ckp.partial_load import PartialLoad
from harness.checks.ckp.prefix_mismatch import PrefixMismatch
from harness.checks.ckp.restored_lost import RestoredThenRebuilt
from harness.checks.ckp.resume_incomplete import ResumeIncomplete
from harness.checks.ckp.running_value_unsaved import RunningValueUnsaved
from harness.checks.ckp.saved_twice import WrongDictSaved
from harness.checks.ckp.schedule_over import ScheduleStartsOver
from harness.checks.ckp.unreadable import CheckpointUnreadable
from harness.checks.engine import judge
from harness.model import OutcomeKind, Severity
from harness.record import Event, Run

PATH = "/w/model.pt"
LATER = 10**15


def two(*by_rank: list[Event], **kwargs: Any) -> Run:
    return run([recording(events, rank=rank) for rank, events in enumerate(by_rank)], **kwargs)


def save(path: str = PATH, y: int = 5, line: int = 40, **fields: Any) -> list[Event]:
    return [
        event("save", line=line, path=path, done=False, y=y, error="", **fields),
        event("save", line=line, path=path, done=True, y=y, error=""),
    ]


def load(path: str = PATH, y: int = 5, error: str = "", error_type: str = "", s: int = 3, **fields: Any) -> list[Event]:
    begin = event("load", line=50, path=path, done=False, y=y, s=s, map_location=None)
    return [
        begin,
        event("load", line=50, path=path, done=True, y=y, s=s, error=error, error_type=error_type, **({"map_location": None} | fields)),
    ]


def test_nothing_crashes_on_torn_and_empty_recordings() -> None:
    kinds = (
        "save",
        "load",
        "load_state",
        "load_optimizer",
        "optimizer_state",
        "load_scheduler",
        "load_scaler",
        "alias_used",
        "rename",
        "open",
        "state_dict",
        "full",
        "params",
        "running_unsaved",
    )
    torn = [event(kind, line=3, s=1) for kind in kinds]
    torn += [
        event("load_state", missing=3, unexpected=None, missing_shapes=7, self_names="x"),
        event("load", done=True, error=5, groups=3, locations=[]),
    ]
    for one in (two([], []), two(torn, torn), run([recording(torn)]), run([recording()])):
        outcomes, _ = judge(one, select=("CKP",))
        assert [(o.code, o.reason) for o in outcomes if o.kind is OutcomeKind.CRASHED] == []


# ---- CKP101 ----
def test_two_ranks_save_one_path() -> None:
    found = findings(AllRanksSaveSamePath, two(save(), save()))
    assert [(f.code, f.severity, f.ranks) for f in found] == [("CKP101", Severity.ERROR, (0, 1))]
    assert found[0].where is not None and found[0].where.line == 40


def test_own_temporaries_renamed_to_one_target_are_a_warning() -> None:
    def atomic(rank: int) -> list[Event]:
        return [*save(f"/w/t{rank}"), event("rename", src=f"/w/t{rank}", dst=PATH, y=5)]

    assert [f.severity for f in findings(AllRanksSaveSamePath, two(atomic(0), atomic(1)))] == [Severity.WARNING]


def test_healthy_saves() -> None:
    assert findings(AllRanksSaveSamePath, two(save(), [])) == []
    assert findings(AllRanksSaveSamePath, two(save("/w/0.pt"), save("/w/1.pt"))) == []
    assert findings(AllRanksSaveSamePath, two(save(y=5), save(y=6))) == []
    assert findings(AllRanksSaveSamePath, two(save(""), save(""))) == []
    assert findings(AllRanksSaveSamePath, run([recording(save(), rank=0, host="a"), recording(save(), rank=1, host="b")])) == []
    assert findings(AllRanksSaveSamePath, two([*save(), event("end", y=7)], [*save(), event("end", y=9)])) == []


def test_init_process_group_orders() -> None:
    joined = event("pg", done=True, rank=1, world_size=2)
    before = [*save(y=0), event("pg", done=True, rank=0, world_size=2)]
    assert findings(LoadBeforeWriteDone, two(before, [joined, *load(y=0)])) == []


# ---- CKP102 ----
def test_load_without_barrier() -> None:
    found = findings(LoadBeforeWriteDone, two(save(), load()))
    assert [(f.code, f.severity, f.ranks) for f in found] == [("CKP102", Severity.WARNING, (1, 0))]
    assert found[0].where is not None and found[0].where.line == 50


def test_load_that_began_before_the_save_ended_is_an_error() -> None:
    early = load()
    assert [f.severity for f in findings(LoadBeforeWriteDone, two(save(), early))] == [Severity.ERROR]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("[Errno 2] No such file", "FileNotFoundError"),
        ("Ran out of input", "EOFError"),
        ("PytorchStreamReader failed reading zip archive", "RuntimeError"),
    ],
)
def test_failed_load_explains_the_crash(error: str, kind: str) -> None:
    failed = load(error=error, error_type=kind)
    crash = event("failure", line=50, type=kind, message=error)
    _, found = judge(two(save(), [*failed, crash], exits=(-15, 1)), select=("CKP", "LAU101"))
    assert [f.code for f in found] == ["CKP102"]
    assert "LAU101" in found[0].consequences


def test_writer_that_never_came_to_its_save() -> None:
    failed = load(
        error="[Errno 2] No such file",
        error_type="FileNotFoundError",
        savers=[{"line": 40, "text": "torch.save(net, path)", "same": True}],
        given=False,
    )
    assert [f.code for f in findings(LoadBeforeWriteDone, two([], failed, exits=(-15, 1)))] == ["CKP102"]
    assert findings(LoadBeforeWriteDone, two(list(failed), failed, exits=(1, 1))) == []  # a wrong path: all ranks find nothing
    named = load(error="[Errno 2]", error_type="FileNotFoundError", savers=[{"line": 40, "text": "", "same": True}], given=True)
    assert findings(LoadBeforeWriteDone, two([], named, exits=(-15, 1))) == []


def test_barrier_polling_for_a_renamed_file_and_own_loads_are_healthy() -> None:
    assert findings(LoadBeforeWriteDone, two(save(y=5), load(y=6))) == []
    assert findings(LoadBeforeWriteDone, two([*save(), *load()], [])) == []
    atomic = [*save("/w/tmp"), event("rename", src="/w/tmp", dst=PATH, y=5)]
    assert findings(LoadBeforeWriteDone, two(atomic, [event("sleep", y=5), *load()])) == []
    messages = [event("coll", op="recv", y=5), *load()]
    assert findings(LoadBeforeWriteDone, two([*save(), event("coll", op="send", y=5)], messages)) == []


def test_polling_for_a_plain_save_is_a_race() -> None:
    assert [f.code for f in findings(LoadBeforeWriteDone, two(save(), [event("sleep", y=5), *load()]))] == ["CKP102"]


def test_plain_files_are_seen() -> None:
    writes = [event("open", line=4, path="/w/vocab.json", mode="w", y=1, locks=0)]
    reads = [event("open", line=8, path="/w/vocab.json", mode="r", y=1, locks=0, exists=True)]
    assert [f.code for f in findings(LoadBeforeWriteDone, two(writes, reads))] == ["CKP102"]
    assert findings(LoadBeforeWriteDone, two(writes, [])) == []


# ---- CKP103, CKP104 ----
def state(
    missing: list[str],
    unexpected: list[str],
    total: int,
    *,
    strict: bool = False,
    error: str = "",
    shapes: list[Any] | None = None,
    **fields: Any,
) -> Event:
    default: list[Any] = [[4, 4]]
    return event(
        "load_state", line=60, mid=7, strict=strict, error=error, missing=missing, unexpected=unexpected,
        num_missing=len(missing), total=total,
        num_unexpected=len(unexpected), matched=total - len(missing), missing_shapes=(shapes or default * len(missing)), s=3,
        unexpected_shapes=default * len(unexpected), self_names=[], num_self=0, **fields,
    )  # fmt: skip


NAMES = ["embed.weight", "dense.weight", "dense.bias", "head.weight"]


@pytest.mark.parametrize(
    ("missing", "given"),
    [
        (NAMES, [f"module.{n}" for n in NAMES]),
        ([f"module.{n}" for n in NAMES], NAMES),
        ([f"module.{n}" for n in NAMES], [f"module._orig_mod.{n}" for n in NAMES]),
        (NAMES, [f"model.{n}" for n in NAMES]),
        ([f"backbone.{n}" for n in NAMES], NAMES),
    ],
)
def test_prefix(missing: list[str], given: list[str]) -> None:
    one = two([state(missing, given, 4)], [state(missing, given, 4)])
    found = findings(PrefixMismatch, one)
    assert [(f.code, f.severity, f.ranks) for f in found] == [("CKP103", Severity.ERROR, (0, 1))]
    _, kept = judge(one, select=("CKP103", "CKP104"))
    assert [f.code for f in kept] == ["CKP103"]


def test_prefix_failing_loudly_explains_the_crash() -> None:
    error = "Error(s) in loading state_dict for Net:\n Missing key(s)"
    events = [
        state(NAMES, [f"module.{n}" for n in NAMES], 4, strict=True, error=error),
        event("failure", line=60, type="RuntimeError", message=error),
    ]
    _, found = judge(two(events, list(events), exits=(1, 1)), select=("CKP", "LAU101"))
    assert [f.code for f in found] == ["CKP103"]


def test_prefix_corrected_by_a_second_load_is_healthy() -> None:
    first = state(NAMES, [f"module.{n}" for n in NAMES], 4, strict=True, error="Error(s) in loading")
    assert findings(PrefixMismatch, two([first, state([], [], 4)], [])) == []
    assert findings(PrefixMismatch, two([state(NAMES, [f"module.{n}" for n in NAMES], 4), state([], [], 4)], [])) == []


def test_filtered_by_hand() -> None:
    file = load(tensors=[f"model/module.{n}" for n in NAMES])
    assert [f.code for f in findings(PrefixMismatch, two([*file, state(NAMES, [], 4)], []))] == ["CKP103"]


def given_back(*, file: list[str], own: list[str] = NAMES, fresh: bool = True, filled: bool = False, missing: tuple[str, ...] = ()) -> Run:
    """A load of the model's own tensors, after a file of other names was read."""
    read = load(tensors=file)
    told = state(list(missing), [], len(own) + len(missing), strict=not missing, fresh=fresh, filled=filled)
    told.data.update(self_names=own, num_self=len(own))
    return two([*read, told], [])


def test_a_filter_that_drops_every_name() -> None:
    (found,) = findings(PrefixMismatch, given_back(file=["model/module.embed.weight", "model/module.dense.weight", "model/module.projector.weight"]))
    assert "0 of 4" in found.message and "`module.`" in found.message and "filter" in found.notes[1]


def test_own_tensors_given_back_for_a_reason() -> None:
    prefixed = [f"module.{n}" for n in NAMES]
    assert findings(PrefixMismatch, given_back(file=prefixed, filled=True)) == []  # copied into them by hand
    assert findings(PrefixMismatch, given_back(file=prefixed, fresh=False)) == []  # kept weights are put back
    assert findings(PrefixMismatch, given_back(file=NAMES)) == []  # the names fit: whatever was left out was a choice
    assert findings(PrefixMismatch, given_back(file=["module.head.weight", "module.other.weight"])) == []  # one name alone is no model
    assert findings(PrefixMismatch, given_back(file=[*prefixed[:2], *NAMES[:1]])) == []


def test_eaten_letters() -> None:
    lost, given = ["embed.weight", "dense.weight", "dense.bias"], ["bed.weight", "nse.weight", "nse.bias"]
    found = findings(PartialLoad, two([state(lost, given, 5)], []))
    assert [(f.code, f.severity) for f in found] == [("CKP104", Severity.ERROR)]
    assert "`bed.weight`" in found[0].notes[0]
    assert findings(PrefixMismatch, two([state(lost, given, 5)], [])) == []


def test_half_of_the_layers() -> None:
    file = load(tensors=["model/a.weight", "model/a.bias", "model/b.weight", "model/b.bias"])
    found = findings(PartialLoad, two([*file, state(["a.bias", "b.bias"], [], 4)], []))
    assert [f.code for f in found] == ["CKP104"]


@pytest.mark.parametrize(
    ("missing", "unexpected", "shapes"),
    [
        (["classifier.weight", "classifier.bias"], ["fc.weight", "fc.bias"], None),
        (["fc.weight"], ["head.weight"], [[10, 8]]),
        (["fc.weight", "fc.bias"], [], None),
        (["bn.num_batches_tracked"], [], [[]]),
        (["layer.lora_a", "layer.lora_b"], [], None),
        ([], ["projector.0.weight"], None),
    ],
)
def test_new_heads_are_healthy(missing: list[str], unexpected: list[str], shapes: list[Any] | None) -> None:
    one = two([*load(tensors=["trunk.weight", "layer.weight"]), state(missing, unexpected, 20, shapes=shapes)], [])
    assert findings(PartialLoad, one) == []
    assert findings(PrefixMismatch, one) == []


def test_nothing_matched() -> None:
    assert [f.code for f in findings(PartialLoad, two([state(["a.w", "b.w", "c.w"], ["x1.k", "y2.k"], 3)], []))] == ["CKP104"]


def test_eaten_is_about_letters_of_a_wrapper() -> None:
    assert keys.eaten("embed.weight", "bed.weight")
    assert not keys.eaten("cls_head.weight", "head.weight")


TOWERS = [f"{side}_module.{i}.weight" for side in ("text", "image") for i in (0, 2)]


def test_a_prefix_taken_out_of_the_middle_of_names() -> None:
    for strict, error in ((False, ""), (True, "Error(s) in loading state_dict for Net:\n Missing key(s)")):
        loaded = state(TOWERS, [n.replace("module.", "") for n in TOWERS], 5, strict=strict, error=error)
        failed = [event("failure", line=60, type="RuntimeError", message=error)] if error else []
        (found,) = findings(PartialLoad, two([loaded, *failed], []))
        assert found.severity is Severity.ERROR and "removeprefix" in found.help and "middle" in found.help
    assert keys.bitten("text_encoder.0.weight", "text_0.weight") and keys.bitten("my_model.a.b", "my_a.b")
    assert not keys.bitten("module.a.weight", "a.weight") and not keys.bitten("net.module.a", "net.a")  # whole components
    assert not keys.bitten("layers.10.weight", "layers.1.weight") and not keys.bitten("conv1.weight", "conv.weight")  # a number, no component


def test_the_script_renames_what_the_file_names_rightly() -> None:
    cut = [f"x{i}" for i in range(4)]
    told = {"came": [f"model/module.{n}" for n in NAMES]}
    (found,) = findings(PartialLoad, two([state(NAMES, cut, 4, **told)], []))
    assert found.severity is Severity.ERROR and "the script renames them" in found.help
    head = state(["head.weight"], ["old_head.weight"], 20, came=["head.weight"])  # set aside, to start anew
    assert all(f.severity is Severity.WARNING for f in findings(PartialLoad, two([head], [])))
    assert findings(PartialLoad, two([state(["head.weight"], ["unused"], 20, came=["head.weight"])], [])) == []


def test_the_dict_around_the_state_is_given() -> None:
    for strict, error in ((False, ""), (True, "Error(s) in loading state_dict for Net:\n Missing key(s)")):
        file = load(tensors=[f"model/{n}" for n in NAMES])
        failed = [event("failure", line=60, type="RuntimeError", message=error)] if error else []
        (found,) = findings(PartialLoad, two([*file, state(NAMES, ["model", "epoch"], 4, strict=strict, error=error), *failed], []))
        assert "load_state_dict(checkpoint['model'])" in found.help and "one level down" in found.notes[0]
    right = [*load(tensors=[f"model/{n}" for n in NAMES]), state([], [], 4)]
    assert findings(PartialLoad, two(right, [])) == []


# ---- CKP115 ----
def test_statistics_that_the_file_lacks() -> None:
    blank = event("blank_stats", line=65, names=["0.running_mean"], num=1, source=PATH, module="Net")
    loaded = state(["0.running_mean", "0.running_var"], [], 6)
    (found,) = findings(BlankStatistics, two([loaded, blank], [loaded, blank]))
    assert found.code == "CKP115" and found.ranks == (0, 1) and found.where is not None and found.where.line == 65
    saved = save(tensors=["0.weight", "0.bias"], line=62)
    (found,) = findings(BlankStatistics, two([*saved, loaded, blank], []))
    assert found.where is not None and found.where.line == 62 and "line 65" in found.notes[0]
    whole = save(tensors=["0.weight", "0.bias", "0.running_mean"], line=62)  # the file has them: the load is to be looked at
    (found,) = findings(BlankStatistics, two([*whole, loaded, blank], []))
    assert found.where is not None and found.where.line == 65
    assert findings(BlankStatistics, two([loaded], [loaded])) == []  # trained on, or copied by the script: told by no event


# ---- CKP116 ----
def read_only(
    *between: Event, model: tuple[int, ...] = (1, 2, 3, 4), file: tuple[int, ...] = (11, 12, 13, 14), here: bool = True, names: list[str] = NAMES
) -> Run:
    """A file whose tensors have the model's names, and the model's first step after it."""
    shapes = [[4, 4]] * 4
    given = load(tensors=[f"model/module.{n}" for n in names], shapes=shapes, digests=list(file), here={n: [d] for n, d in zip(NAMES, model, strict=True)} if here else {})
    between = tuple(event(e.kind, **{k: v for k, v in e.data.items() if k not in ("k", "t", "y")}) for e in between)  # after the load
    begun = [event("params", opt=0, names=NAMES, shapes=shapes, s=3), event("initial", opt=0, each=list(model), s=3)]
    return two([*given, *between, *begun], [*given, *between, *begun])


def read_out(text: str = "own = net.state_dict()") -> Event:
    return event("state_dict", s=3, site=site(34, text))


def test_a_file_that_is_read_and_put_nowhere() -> None:
    (found,) = findings(LoadedIntoNothing, read_only(read_out()))
    assert (found.code, found.severity, found.ranks) == ("CKP116", Severity.ERROR, (0, 1))
    assert found.where is not None and found.where.line == 34
    assert "prefix" in found.help and "`module.`" in found.notes[-1]
    (found,) = findings(LoadedIntoNothing, read_only(event("load_optimizer", line=70, source=PATH)))  # the optimizer goes on, the model does not
    assert found.severity is Severity.ERROR and found.where is not None and found.where.line == 50
    assert [f.severity for f in findings(LoadedIntoNothing, read_only())] == [Severity.ADVICE]  # perhaps for something else
    kept = read_only(read_out("start = copy.deepcopy(net.state_dict())"))  # a lottery ticket: the file gives the mask
    assert [f.severity for f in findings(LoadedIntoNothing, kept)] == [Severity.ADVICE]


def test_a_frozen_part_that_the_file_was_read_for() -> None:
    """The optimizer holds a new head alone."""
    def probe(each: list[int], read: Event) -> Run:
        shapes = [[4, 4]] * 4
        given = load(tensors=[f"module.{n}" for n in NAMES], shapes=shapes, digests=[11, 12, 13, 14], here={n: [d] for n, d in zip(NAMES, (1, 2, 3, 4), strict=True)})
        read = event(read.kind, **{k: v for k, v in read.data.items() if k not in ("k", "t", "y")})
        frozen = event("frozen_initial", opt=0, s=3, names=NAMES, shapes=shapes, each=each)
        begun = [event("params", opt=0, names=["new.weight"], shapes=[[4, 4]], s=3), frozen, event("initial", opt=0, each=[9], s=3)]
        return two([*given, read, *begun], [*given, read, *begun])

    (found,) = findings(LoadedIntoNothing, probe([1, 2, 3, 4], read_out()))
    assert found.severity is Severity.ERROR and "4 of 5" in found.message
    assert findings(LoadedIntoNothing, probe([11, 12, 13, 14], read_out())) == []  # copied in by hand
    assert findings(LoadedIntoNothing, probe([5, 6, 7, 8], read_out())) == []  # and cast
    assert findings(LoadedIntoNothing, probe([5, 6, 7, 8], event("load_optimizer", line=70, source=PATH))) == []


def test_weights_that_came_to_stand_somewhere() -> None:
    assert findings(LoadedIntoNothing, read_only(read_out(), state([], [], 4))) == []  # loaded, into this model or a teacher
    assert findings(LoadedIntoNothing, read_only(read_out(), model=(11, 2, 3, 4))) == []  # some were copied by hand
    assert findings(LoadedIntoNothing, read_only(read_out(), names=["a", "b", "c", "d"])) == []  # another model's
    assert findings(LoadedIntoNothing, two([*load(tensors=NAMES)], [])) == []  # no step afterwards, or an old recording
    moved = read_only(read_out(), here=False)  # put in place by arithmetic (an average): not what they were, nor the file's
    assert findings(LoadedIntoNothing, moved) == []


# ---- CKP105 ----
def test_state_by_position() -> None:
    taken = event("optimizer_state", kind="Adam", names=["a.w", "b.w"], digests=[11, 22])
    crossed = event("load_optimizer", line=70, kind="Adam", params=2, names=["b.w", "a.w"], digests=[11, 22], mismatched=[], given_names=[])
    straight = event(
        "load_optimizer", line=70, kind="Adam", params=2, names=["Net.a.w", "Net.b.w"], digests=[11, 22], mismatched=[], given_names=[]
    )
    found = findings(OptimizerStateByPosition, two([taken, crossed], []))
    assert [(f.code, f.severity) for f in found] == [("CKP105", Severity.ERROR)]
    assert found[0].notes[0] == "`b.w` gets the state of `a.w`"
    assert findings(OptimizerStateByPosition, two([taken, straight], [])) == []


def test_state_by_names_in_the_file_and_by_shape() -> None:
    named = event("load_optimizer", line=70, params=2, names=["b.w", "a.w"], digests=[0, 0], mismatched=[], given_names=["a.w", "b.w"])
    assert len(findings(OptimizerStateByPosition, two([named], []))) == 1
    shapes = event("load_optimizer", line=70, params=2, names=["b.w", "a.w"], digests=[0, 0], mismatched=["b.w"], given_names=[])
    assert "another shape" in findings(OptimizerStateByPosition, two([shapes], []))[0].message


# ---- CKP106 ----
def rows(num: int, **digests: int) -> list[bytes]:
    return [row(step, **({"param": 1, "hyper": 1} | digests)) for step in range(num)]


def test_optimizer_restored_on_one_rank() -> None:
    loaded = [event("load_optimizer", line=70, s=0)]
    parted = run([recording(loaded, rows(4), rank=0), recording([], rows(4, param=2), rank=1)])
    found = findings(ResumeOnOneRank, parted)
    assert [(f.code, f.ranks) for f in found] == [("CKP106", (0,))]
    states = [event("full", opt=0, state={"a": 1})], [event("full", opt=0, state={"a": 2})]
    by_state = run([recording(loaded + states[0], rows(4), rank=0), recording(states[1], rows(4), rank=1)])
    assert len(findings(ResumeOnOneRank, by_state)) == 1


def test_state_that_was_sent_to_all_is_healthy() -> None:
    loaded = [event("load_optimizer", line=70, s=0), event("load_state", line=69, s=0)]
    assert findings(ResumeOnOneRank, run([recording(loaded, rows(4), rank=0), recording([], rows(4), rank=1)])) == []
    last = [event("load_state", line=69, s=4)]
    assert findings(ResumeOnOneRank, run([recording(last, rows(4), rank=0), recording([], rows(4, param=2), rank=1)])) == []


# ---- CKP107 ----
GROUPS = {"model": "model", "optimizer": "optimizer", "epoch": "number"}


def resumed(
    *restores: Event, groups: dict[str, str] | None = None, own: bool = True, before: int = 3, num: int = 8, sched: bool = False
) -> Run:
    table = [row(n, opt=0 if n < before else 1, sched=n if sched else 0, scale=0) for n in range(num)]
    made = [event("params", opt=0, kind="Adam", names=["a"], s=0), event("params", opt=1, kind="Adam", names=["a"], s=before)]
    saved = save(groups=groups or GROUPS) if own else []
    opened = load(groups=groups or GROUPS, s=before)
    return run(
        [
            recording(
                [*saved, *opened, event("load_state", line=60, s=before, matched=4, total=4, error="", source=PATH), *restores, *made],
                table,
            )
        ]
    )


def test_optimizer_not_restored() -> None:
    found = findings(ResumeIncomplete, resumed())
    assert [(f.code, f.severity) for f in found] == [("CKP107", Severity.WARNING)]
    assert "`optimizer`" in found[0].message
    assert findings(ResumeIncomplete, resumed(event("load_optimizer", t=LATER, s=3))) == []


def test_fine_tuning_is_a_choice() -> None:
    assert findings(ResumeIncomplete, resumed(own=False, before=0)) == []


def test_warm_start_from_an_older_run_is_advice() -> None:
    older = resumed(event("save", line=40, path="/w/other.pt", done=False, groups=GROUPS), own=False)
    assert [f.severity for f in findings(ResumeIncomplete, older)] == [Severity.ADVICE]


def transferred(width: int, *restored: Event) -> Run:
    """The file holds a head of ten classes; the model that trains from here on has one of `width`."""
    made = event("params", t=LATER, opt=1, kind="Adam", names=["fc.weight"], shapes=[[width, 4]], s=3)
    held = load(groups={"fc.weight": "tensor"}, tensors=["fc.weight"], shapes=[[10, 4]])
    taken = event("load_state", line=60, s=3, matched=4, total=4, error="", source=PATH)
    table = [row(n, opt=0 if n < 3 else 1, scale=0) for n in range(8)]
    return run([recording([*save(groups={"fc.weight": "tensor"}), *held, taken, *restored, made], table)])


def test_a_new_head_is_no_resume() -> None:
    assert [f.severity for f in findings(ResumeIncomplete, transferred(10))] == [Severity.ADVICE]
    assert findings(ResumeIncomplete, transferred(4)) == []
    assert findings(ResumeIncomplete, transferred(10, event("load_optimizer", t=LATER, s=3))) == []  # from a file of its own


def test_schedule_not_restored() -> None:
    groups = GROUPS | {"sched": "scheduler"}
    assert [
        f.evidence["lost"] for f in findings(ResumeIncomplete, resumed(event("load_optimizer", t=LATER, s=3), groups=groups, sched=True))
    ] == [["sched"]]
    given = (event("load_optimizer", t=LATER, s=3), event("load_scheduler", t=LATER, s=3))
    assert findings(ResumeIncomplete, resumed(*given, groups=groups, sched=True)) == []
    assert findings(ResumeIncomplete, resumed(event("load_optimizer", t=LATER, s=3), groups=groups)) == []


LEFT_OUT = {"model": "model", "epoch": "number"}


def without_optimizer(first: int = 3, saved: int = 5, line: int = 9, lr: float = 0.1, before: int = 3, **fields: Any) -> Run:
    """A file of the model and epoch 3 is loaded; the next one says epoch `saved`, after two passes; `first` is given to set_epoch."""
    table = [row(n, opt=0 if n < before else 1, scale=0) for n in range(8)]
    kind = {"kind": "Adam", "names": ["a"]} | fields
    made = [event("params", opt=0, line=9, groups=[{"lr": 0.1}], s=0, **kind), event("params", opt=1, line=line, groups=[{"lr": lr}], s=before, **kind)]
    files = [*save(groups=LEFT_OUT, numbers={"epoch": 3}), *load(groups=LEFT_OUT, numbers={"epoch": 3}, s=before)]
    loaded = event("load_state", line=60, s=before, matched=4, total=4, error="", source=PATH)
    epochs = [event("set_epoch", line=70, epoch=first, sampler=1, s=before, t=LATER)] if first >= 0 else []
    passes = [
        e
        for n in range(2)
        for e in (
            event("loader", line=71, loop=n, loader=0, t=LATER + 10 * n + 1, s=before),
            event("pass", line=71, loop=n, t=LATER + 10 * n + 2, s=before + 2 * n + 2, steps=2, backwards=2),
        )
    ]
    last = [event("save", line=41, path=PATH, done=False, t=LATER + 90, s=8, error="", groups=LEFT_OUT, numbers={"epoch": saved})]
    return run([recording([*files, loaded, *epochs, *passes, *last, *made], table)])


def test_a_resume_whose_file_holds_no_optimizer() -> None:
    found = findings(ResumeIncomplete, without_optimizer())
    assert [(f.severity, f.where.line if f.where else 0) for f in found] == [(Severity.WARNING, 40)]
    assert "`epoch` 3 with a new Adam" in found[0].message
    counted = findings(ResumeIncomplete, without_optimizer(first=-1))  # no sampler is told, but the next file's number says so
    assert [f.severity for f in counted] == [Severity.WARNING]
    fresh_process = findings(ResumeIncomplete, without_optimizer(before=0))
    assert [f.severity for f in fresh_process] == [Severity.WARNING]


@pytest.mark.parametrize(
    "healthy",
    [
        without_optimizer(first=0, saved=2),  # a warm start counts from 0
        without_optimizer(first=-1, saved=7),  # a number that has not grown by what was trained
        without_optimizer(lr=0.01),  # a second stage with another rate
        without_optimizer(line=12),  # or another optimizer
        without_optimizer(kind="SGD"),  # nothing to keep
    ],
)
def test_a_file_without_an_optimizer_that_is_no_fault(healthy: Run) -> None:
    assert [f for f in findings(ResumeIncomplete, healthy) if f.severity > Severity.ADVICE] == []


def test_an_optimizer_without_state_that_dcp_was_to_fill() -> None:
    empty = [event("unfilled_optimizer", line=63, kind="AdamW", entry="optimizer", path="/c/epoch3", held=4, moments=["exp_avg"], loaded_at=3)] * 2
    (found,) = findings(ResumeIncomplete, run([recording(empty, rank=r, world_size=2) for r in (0, 1)]))
    assert found.severity is Severity.WARNING and found.where is not None and found.where.line == 63 and found.ranks == (0, 1)
    assert "epoch3" in found.message and "AdamW" in found.message and "exp_avg" in found.notes[0]
    both = findings(ResumeIncomplete, resumed(*empty))  # beside a file of torch.load
    assert len(both) == 2


# ---- CKP108 ----
def test_map_location() -> None:
    foreign = load(locations={"cuda:0": 4}, device="cuda:1")
    assert [f.code for f in findings(MapLocationMissing, two(load(locations={"cuda:0": 4}, device="cuda:0"), foreign))] == ["CKP108"]
    assert findings(MapLocationMissing, two(load(locations={"cpu": 4}, device="cpu"), load(locations={"cuda:1": 4}, device="cuda:1"))) == []
    given = load(locations={"cuda:0": 4}, device="cuda:1", map_location="cpu")
    assert findings(MapLocationMissing, two(given, given)) == []
    trains = event("params", opt=0, names=["a"], devices=["cuda:1"])  # nobody called set_device: the current device is 0 on every rank
    assert len(findings(MapLocationMissing, two([], [*load(locations={"cuda:0": 4}, device="cuda:0"), trains]))) == 1
    refused = load(error="Attempting to deserialize object on a CUDA device but ...", error_type="RuntimeError", device="cpu", locations={})
    assert [f.ranks for f in findings(MapLocationMissing, two(refused, refused))] == [(0, 1)]


# ---- CKP109 ----
def used(how: str, before: int, now: int, **fields: Any) -> Event:
    told = {
        "how": how,
        "token": 3,
        "kept_at": site(80),
        "steps_before": before,
        "steps_now": now,
        "changed": True,
        "path": "/w/best.pt",
    } | fields
    return event("alias_used", line=90, s=now, **told)


def test_alias() -> None:
    kept = event("state_dict", line=80, s=10)
    found = findings(AliasForCopy, run([recording([kept, used("save", 10, 30)])]))
    assert [(f.code, f.where and f.where.line) for f in found] == [("CKP109", 80)]
    assert len(findings(AliasForCopy, run([recording([kept, used("load", 10, 30)])]))) == 1


def test_alias_that_means_the_live_weights() -> None:
    kept = event("state_dict", line=80, s=0)
    assert findings(AliasForCopy, run([recording([kept, used("save", 0, 30)])])) == []
    assert (
        len(findings(AliasForCopy, run([recording([kept, used("load", 0, 30, same_module=True)])]))) == 1
    )  # a sweep that wants its start back
    assert findings(AliasForCopy, run([recording([kept, used("load", 10, 20), used("load", 10, 30)])])) == []
    assert findings(AliasForCopy, run([recording([kept, used("save", 10, 20), used("save", 10, 30)])])) == []
    assert findings(AliasForCopy, run([recording([kept, used("save", 10, 30, changed=False)])])) == []
    assert findings(AliasForCopy, run([recording([kept])])) == []


def test_several_kept_dicts_that_are_the_live_weights() -> None:
    kept = event("kept_live", line=17, s=30, num=3, name="self.kept", steps=[10, 20])
    found = findings(AliasForCopy, run([recording([kept])]))
    assert [(f.code, f.where and f.where.line) for f in found] == [("CKP109", 17)] and "from steps 10 to 20" in found[0].message


def test_no_op_load() -> None:
    own = event("load_state", line=91, s=20, num_self=4, total=4, fresh=False, error="")
    assert len(findings(AliasForCopy, run([recording([own])]))) == 1
    fresh = event("load_state", line=91, s=20, num_self=4, total=4, fresh=True, error="", kept_at=site(80))
    assert findings(AliasForCopy, run([recording([fresh])])) == []
    held = event(
        "state_held", line=80, s=20, steps_before=10
    )  # the last epoch happened to be the best: the kept dict is fresh, and an alias all the same
    assert [f.where and f.where.line for f in findings(AliasForCopy, run([recording([held, fresh])]))] == [80]


def test_state_that_was_replaced_since_it_was_read_out() -> None:
    swap = {"num_self": 4, "total": 4, "fresh": True, "error": "", "kept_at": site(80)}
    found = findings(AliasForCopy, run([recording([event("load_state", line=91, s=20, replaced=True, **swap)])]))
    assert [f.where and f.where.line for f in found] == [80]
    assert findings(AliasForCopy, run([recording([event("load_state", line=91, s=20, replaced=False, **swap)])])) == []


def test_weights_are_stepped_while_a_thread_saves_them() -> None:
    found = findings(AliasForCopy, run([recording([used("save", 10, 13, torn=True)])]))
    assert [f.where and f.where.line for f in found] == [80] and "steps 10 to 13" in found[0].message


def test_parameters_copied_onto_themselves() -> None:
    copied = {"line": 95, "s": 12, "num": 4, "kept_at": site(88)}
    found = findings(AliasForCopy, run([recording([event("self_copy", moved=True, **copied)])]))
    assert [(f.code, f.where and f.where.line) for f in found] == [("CKP109", 88)]
    assert findings(AliasForCopy, run([recording([event("self_copy", moved=False, **copied)])])) == []


# ---- CKP112 ----
def test_unreadable() -> None:
    message = "PytorchStreamReader failed reading zip archive: failed finding central directory"
    broken = load(error=message, error_type="RuntimeError", size=100)
    _, found = judge(
        run([recording([*broken, event("failure", line=50, type="RuntimeError", message=message)])], exits=(1,)), select=("CKP", "LAU101")
    )
    assert [(f.code, f.severity) for f in found] == [("CKP112", Severity.ERROR)]
    assert [f.severity for f in findings(CheckpointUnreadable, run([recording(broken)]))] == [Severity.ADVICE]
    empty = load(error="EOFError()", error_type="EOFError", size=0)
    died = event("failure", line=50, type="EOFError", message="")  # an empty file's error has no words
    assert [f.severity for f in findings(CheckpointUnreadable, run([recording([*empty, died])], exits=(1,)))] == [Severity.ERROR]
    other = event("failure", line=70, type="ValueError", message="")
    assert [f.severity for f in findings(CheckpointUnreadable, run([recording([*empty, other])], exits=(1,)))] == [Severity.ADVICE]
    refused = load(error="Weights only load failed. Unsupported global: GLOBAL x.Y", error_type="UnpicklingError")
    assert findings(CheckpointUnreadable, run([recording(refused)])) == []


# ---- CKP113 ----
def sittings(
    rates: list[float], again: list[float], *, lr: float | None = 0.5, epochs: tuple[int, int] = (2, 3), more: tuple[Event, ...] = (), counts_on: str = "",
    cyclic: bool = False,
) -> Run:  # fmt: skip
    """Two sittings in one process, with a load of the optimizer's state between them."""
    num = len(rates)
    drawn = [
        e
        for loop, (epoch, t) in enumerate(zip(epochs, (10, 30), strict=True))
        for e in (
            event("loader", line=29, t=t, loop=loop, loader=0, distributed={"epoch": epoch}),
            event("pass", line=29, t=t + 1, loop=loop, loader=0, backwards=4, indices=""),
        )
    ]
    given = event("load_optimizer", t=21, line=51, lr=lr, s=num, counts_on=counts_on, cyclic=cyclic)
    loads = [event("load", t=20, line=50, done=True, numbers={"step": num}, s=num), given]
    rows = [row(s, opt=int(s >= num), lr=rate) for s, rate in enumerate([*rates, *again])]
    return run([recording([*drawn, *loads, *more], rows)])


WARM_UP = [0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_schedule_that_starts_over() -> None:
    found = findings(ScheduleStartsOver, sittings(WARM_UP, WARM_UP))
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("CKP113", Severity.WARNING, 51)]
    assert "the checkpoint holds `step` 5" in found[0].notes
    assert [f.severity for f in findings(ScheduleStartsOver, sittings(WARM_UP, WARM_UP, epochs=(2, 0)))] == [Severity.ADVICE]


def test_a_loop_that_counts_on_from_the_file_is_no_second_stage() -> None:
    (found,) = findings(ScheduleStartsOver, sittings(WARM_UP, WARM_UP, epochs=(2, 0), counts_on="step"))
    assert found.severity is Severity.WARNING
    (found,) = findings(ScheduleStartsOver, sittings(WARM_UP, WARM_UP, epochs=(2, 0), counts_on="epoch"))  # which the file does not hold
    assert found.severity is Severity.ADVICE


def test_a_new_scheduler_lets_the_loaded_rate_stand_for_one_step() -> None:
    assert [f.code for f in findings(ScheduleStartsOver, sittings(WARM_UP, [0.5, *WARM_UP[1:]]))] == ["CKP113"]


def scheduled(*at: int) -> tuple[Event, ...]:
    return tuple(event("scheduler", t=t, line=60, id=7) for t in at)


@pytest.mark.parametrize(
    "healthy",
    [
        sittings(WARM_UP, [0.5, 0.4, 0.3, 0.2, 0.1]),  # goes on
        sittings(WARM_UP, [0.05] * 5),  # a new rate for a new phase
        sittings([0.1] * 5, [0.1] * 5),  # a constant rate, put back
        sittings(WARM_UP, WARM_UP, lr=0.1),  # the state held this rate
        sittings(WARM_UP, WARM_UP, lr=None),
        sittings(WARM_UP, WARM_UP, more=scheduled(5, 40)),  # one scheduler that restarts on purpose
        sittings(WARM_UP, WARM_UP, more=(event("load_scheduler", t=22, s=5, last_epoch=5),)),
        sittings(WARM_UP, WARM_UP, counts_on="step", cyclic=True),  # interrupted where a cycle ends
    ],
)
def test_a_schedule_that_goes_on_is_healthy(healthy: Run) -> None:
    assert findings(ScheduleStartsOver, healthy) == []


# ---- CKP114 ----
def restores(weights: tuple[int, int], *, had: tuple[int, int] = (7, 7), after: list[Event] | None = None, kept: tuple[int, int] = (2, 3), s: int = 4) -> Run:
    own = []
    for rank in range(2):
        told = [event("wrap", index=0, group_size=2), event("state_dict", line=40, s=kept[rank], token=1)]
        told.append(event("load_state", line=60, s=s, error="", weights=weights[rank], had=had[rank], num_self=0, total=4))
        own.append(recording([*told, *(after or [])], [row(i) for i in range(4)], rank=rank))
    return run(own)


def test_ranks_restore_different_epochs() -> None:
    found = findings(RanksLoadDifferentWeights, restores((1, 2), s=3))  # a step follows
    assert [(f.code, f.severity, f.ranks) for f in found] == [("CKP114", Severity.WARNING, (0, 1))]
    assert found[0].where is not None and found[0].where.line == 40 and "step 2 (rank 0), step 3 (rank 1)" in found[0].notes[0]
    assert [f.severity for f in findings(RanksLoadDifferentWeights, restores((1, 2)))] == [Severity.ADVICE]  # nobody uses them together


def test_loads_that_leave_replicas_equal() -> None:
    assert findings(RanksLoadDifferentWeights, restores((1, 1))) == []
    assert findings(RanksLoadDifferentWeights, restores((0, 0), had=(0, 0))) == []  # sharded: not looked at
    assert findings(RanksLoadDifferentWeights, restores((1, 2), had=(5, 6))) == []  # experts: they differed before
    assert findings(RanksLoadDifferentWeights, restores((1, 2), after=[event("coll", t=LATER, line=61, s=4, op="broadcast")])) == []
    assert findings(RanksLoadDifferentWeights, restores((1, 2), after=[event("wrap", t=LATER, s=4, index=1, group_size=2)])) == []


# ---- CKP117 ----
def test_restored_then_rebuilt() -> None:
    loaded = event("load_state", line=60, s=3, matched=4, total=4, error="", source=PATH)
    lost = event("restored_lost", line=60, what="module", kind="Net", num=4, source=PATH, rebuilt=site(30), trained=False)
    found = findings(RestoredThenRebuilt, two([loaded, lost], [loaded, lost]))
    assert [(f.code, f.where and f.where.line, f.ranks) for f in found] == [("CKP117", 30, (0, 1))]
    assert findings(RestoredThenRebuilt, two([loaded], [loaded])) == []
    with_optimizer = event("restored_lost", line=61, what="optimizer", kind="Adam", num=4, source=PATH, rebuilt=site(31), trained=True)
    assert "the Adam of 4 parameters that line 61 restored" in findings(RestoredThenRebuilt, two([loaded, with_optimizer]))[0].message


# ---- CKP118 ----
RECORDS = {"model": "model", "epoch": "number", "best": "number"}


def records(before: list[float], stored: float, after: list[float], first: int = 3, key: str = "best") -> Run:
    """Files whose record is `before`, a load of `stored`, then files with `after`; the sampler starts with epoch `first`."""
    groups = {"model": "model", "epoch": "number", key: "number"}

    def saves(values: list[float], epoch: int) -> list[Event]:
        return [e for n, v in enumerate(values) for e in save(groups=groups, numbers={"epoch": epoch + n, key: v})]

    earlier = saves(before, 1)  # events are made in the order of time
    opened = load(groups=groups, numbers={"epoch": 3, key: stored}, s=3)
    epochs = event("set_epoch", line=70, epoch=first, sampler=1, s=3)
    return run([recording([*earlier, *opened, epochs, *saves(after, 4)], [row(n) for n in range(8)])])


def test_a_record_that_was_not_restored() -> None:
    found = findings(BestForgotten, records([0.9, 0.5, 0.4], 0.4, [0.45, 0.42]))
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("CKP118", Severity.WARNING, 50)]
    assert len(findings(BestForgotten, records([0.1, 0.8], 0.8, [0.7], key="best_acc"))) == 1
    assert len(findings(BestForgotten, records([0.9, 0.5, 0.4], 0.4, [0.45, 0.42], key="min_val_loss"))) == 1


@pytest.mark.parametrize(
    "healthy",
    [
        records([0.9, 0.5, 0.4], 0.4, [0.4, 0.3]),
        records([0.9, 0.5, 0.4], 0.4, [0.7, 0.6], first=0),  # a new phase
        records([0.9, 0.5, 0.7], 0.7, [0.8], key="best"),  # no record: it has risen and fallen
        records([0.9, 0.5, 0.4], 0.4, [0.45, 0.42], key="loss"),
        records([0.9, 0.5, 0.4], 0.4, [0.45, 0.42], key="max_batch_loss"),  # of an epoch
        records([0.9, 0.5, 0.4], 0.4, [0.45, 0.42], key="max_grad_norm"),
        records([0.4], 0.4, [0.45]),  # nothing says whether low is good
    ],
)
def test_records_that_are_no_fault(healthy: Run) -> None:
    assert findings(BestForgotten, healthy) == []


# ---- CKP119 ----
def test_latest_by_name() -> None:
    def resumed_from(newest: str, restored: bool = True) -> Run:
        begin, end = load()
        begin.data["newest"] = newest  # type: ignore[index]
        given = [event("load_optimizer", line=61, s=3, source=PATH)] if restored else []
        return run([recording([begin, end, *given], [row(n) for n in range(8)])])

    found = findings(LatestByName, resumed_from("step-120.pt"))
    assert [(f.code, f.where and f.where.line) for f in found] == [("CKP119", 50)] and "step-120.pt" in found[0].message
    assert findings(LatestByName, resumed_from("")) == []
    assert findings(LatestByName, resumed_from("step-120.pt", restored=False)) == []


# ---- CKP120 ----
def dicts(second: int, read: tuple[int, ...] = (1, 2), path: str = "/w/ema.pt", num: int = 4, line: int = 43, unused: bool = True) -> Run:
    """Dict 1 (the model's) goes to one file, dict `second` to another; `read` were read in that step."""
    made = [event("state_dict", line=30 + t, s=9, module="Net", num=4 if t == 1 else num, token=t, unused=unused) for t in read]
    saves = [
        event("saved_dicts", line=40, s=9, path=PATH, tokens=[1]),
        event("saved_dicts", line=line, s=9, path=path, tokens=[second]),
    ]
    return run([recording([*made, *saves], [row(n) for n in range(12)])])


def test_one_dict_under_two_names_and_another_nowhere() -> None:
    found = findings(WrongDictSaved, dicts(second=1))
    assert [(f.code, f.where and f.where.line) for f in found] == [("CKP120", 43)] and "line 32 reads out" in found[0].message
    assert findings(WrongDictSaved, dicts(second=2)) == []
    assert findings(WrongDictSaved, dicts(second=1, read=(1,))) == []  # last and best
    assert findings(WrongDictSaved, dicts(second=1, num=9)) == []  # another model's, read for something else
    assert findings(WrongDictSaved, dicts(second=1, line=40)) == []  # one statement in a loop over names
    assert findings(WrongDictSaved, dicts(second=1, path=PATH)) == []  # written again
    assert findings(WrongDictSaved, dicts(second=1, unused=False)) == []  # last and best, and how far the average is from them


# ---- CKP121 ----
def test_a_scheduler_is_given_the_state_of_an_optimizer() -> None:
    def given(*keys: str, groups: dict[str, str] | None = None) -> Run:
        return two([*save(groups=groups or {}), event("load_scheduler", line=62, kind="CosineAnnealingLR", last_epoch=None, foreign=list(keys))], [])

    found = findings(ForeignStateRestored, given("state", "param_groups", groups={"scheduler": "optimizer"}))
    assert [(f.code, f.where and f.where.line) for f in found] == [("CKP121", 40)] and "the state of an optimizer" in found[0].message
    assert [f.where and f.where.line for f in findings(ForeignStateRestored, given("state", "param_groups"))] == [62]
    assert len(findings(ForeignStateRestored, given("model"))) == 1
    assert findings(ForeignStateRestored, given()) == []


# ---- CKP122 ----
def test_a_running_value_that_the_file_lacks() -> None:
    told = event(
        "running_unsaved", line=40, path=PATH, module="Scaler", names=["scaler.mean", "scaler.var"], updated=site(23), made=site(12)
    )
    found = findings(RunningValueUnsaved, two([*save(), told], []))
    assert [(f.code, f.where and f.where.line, f.severity) for f in found] == [("CKP122", 12, Severity.WARNING)]
    assert "`scaler.mean`" in found[0].message and "model.pt" in found[0].message and any("line 23" in n for n in found[0].notes)
    assert findings(RunningValueUnsaved, two([*save()], [])) == []
    outcomes, _ = judge(two([], []), select=("CKP122",))
    assert [o.kind for o in outcomes if o.code == "CKP122"] == [OutcomeKind.NOT_APPLICABLE]
