"""Training processes that the script starts itself: what the parent gave them, what they did, what became of the parent's models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from harness.model import Where
from harness.record import Event, Recording, Run, number, where_of


@dataclass(frozen=True)
class Model:
    """One of the parent's models as it was when a worker had been started."""

    data: Mapping[str, Any]

    @property
    def id(self) -> int:
        return number(self.data.get("id"))

    @property
    def serial(self) -> int:
        """The same for one module at every start; -1: not told."""
        return number(self.data.get("serial"), -1)

    @property
    def outside(self) -> bool:
        """The worker does not get it, but an equal copy of it."""
        return "outside" in self.data

    @property
    def copied(self) -> Where | None:
        """The statement that made that copy."""
        return where_of(self.data.get("outside"))

    @property
    def kind(self) -> str:
        return str(self.data.get("module") or "?")

    @property
    def made(self) -> Where | None:
        """The statement that made it."""
        return where_of(self.data.get("made"))

    @property
    def num(self) -> int:
        return number(self.data.get("num"))

    @property
    def trainable(self) -> int:
        return number(self.data.get("requires_grad"))

    @property
    def shared(self) -> bool:
        """Its parameters lie in shared memory; spawn and forkserver put them there on the way."""
        return number(self.data.get("shared")) >= self.num > 0

    @property
    def shapes(self) -> list[list[int]]:
        found = self.data.get("shapes")
        return sorted(found) if isinstance(found, list) else []


@dataclass
class Worker:
    """One child process."""

    started: Event
    joined: Event | None
    recording: Recording | None

    @cached_property
    def models(self) -> list[Model]:
        found = self.started["models"]
        return [Model(m) for m in found if isinstance(m, Mapping)] if isinstance(found, list) else []

    @property
    def method(self) -> str:
        return str(self.started["method"] or "")

    @property
    def where(self) -> Where | None:
        return self.started.where

    @property
    def steps(self) -> int:
        return self.recording.num_steps if self.recording is not None else 0

    @property
    def trained(self) -> bool:
        """It stepped, or at least ran a backward."""
        return self.recording is not None and (self.steps > 0 or bool(self.recording.of("loss")))

    @property
    def ended_well(self) -> bool:
        return self.joined is not None and self.joined["exitcode"] == 0

    @property
    def steps_shared(self) -> bool:
        """It steps an optimizer whose parameters all lie in shared memory."""
        told = self.recording.of("params") if self.recording is not None else []
        return self.steps > 0 and any(number(e["shared"]) >= len(e["names"] or ()) > 0 for e in told)

    @property
    def distributed(self) -> bool:
        return self.recording is not None and bool(self.recording.of("pg"))

    @cached_property
    def trained_shapes(self) -> list[list[list[int]]]:
        """Sorted shapes of what each of its optimizers held."""
        found = self.recording.of("params") if self.recording is not None else []
        return [sorted(e["shapes"]) for e in found if isinstance(e["shapes"], list)]

    def changed(self, model: int) -> bool | None:
        """Whether a model of the parent's had changed when this worker was joined; None: not known."""
        told = self.joined["models"] if self.joined is not None else None
        for one in told if isinstance(told, list) else []:
            if isinstance(one, Mapping) and one.get("id") == model:
                return bool(one.get("changed"))
        return None


@dataclass
class Team:
    """The workers of one parent, in order of their start."""

    rank: int
    parent: Recording
    workers: list[Worker] = field(default_factory=list)

    def given(self) -> dict[int, list[tuple[Worker, Model]]]:
        """Model of the parent's -> the workers that had it in reach."""
        found: dict[int, list[tuple[Worker, Model]]] = {}
        for worker in self.workers:
            for model in worker.models:
                found.setdefault(model.id, []).append((worker, model))
        return found

    @property
    def began_ns(self) -> int:
        return self.workers[0].started.t_ns

    def uses(self, model: int) -> list[Event]:
        """The parent's uses of a model after a join."""
        return [e for e in self.parent.of("model_used") if e["id"] == model]

    def changed_later(self, model: int) -> bool:
        """The parent itself put something into the model before it used it, or before its end."""
        told = [one for e in self.parent.of("models_left") for one in e["models"] or () if isinstance(one, Mapping)]
        return any(one.get("changed") and one.get("id") == model for one in told) or any(e["changed"] for e in self.uses(model))

    def took_results(self) -> bool:
        """The parent trained, or put some state into a model, since: results came back another way."""
        kinds = ("load_state", "load", "load_optimizer")
        # a load before the last start may be a copy that is being made for the next worker; the last worker's results come after it
        loaded = any(e.t_ns > self.workers[-1].started.t_ns and not (kind == "load" and e["error"]) for kind in kinds for e in self.parent.of(kind))
        return loaded or any(row.t_ns > self.began_ns for row in self.parent.all_rows())


def teams(run: Run) -> list[Team]:
    """Parents with processes of their own that form no process group."""
    by_pid = {p.pid: p for p in run.processes}
    found: list[Team] = []
    for parent in run.processes:
        starts = parent.of("process_start")
        if not starts:
            continue
        joined = {e["child"]: e for e in parent.of("process_join")}  # not by key: a new Process may lie where an old one lay
        workers = [Worker(e, joined.get(e["child"]), by_pid.get(number(e["child"], -1))) for e in starts]
        if not any(w.distributed for w in workers):
            found.append(Team(max(parent.rank, 0), parent, workers))
    return found


@dataclass(frozen=True)
class Untouched:
    """A model that workers trained, or copies of it, and that is the same in the parent as before."""

    team: Team
    model: Model
    workers: list[Worker]
    used: bool  # the parent has used it since


def untouched(run: Run) -> list[Untouched]:
    """Only where every worker has ended well, was joined, and the results did not come back in another way."""
    found: list[Untouched] = []
    for team in teams(run):
        if team.took_results():
            continue
        moved = {id for id, pairs in team.given().items() if any(w.changed(id) for w, _ in pairs)}
        shapes_moved = [pairs[0][1].shapes for id, pairs in team.given().items() if id in moved]
        for id, pairs in team.given().items():
            model = pairs[-1][1]
            trained = [w for w, _ in pairs if model.shapes in w.trained_shapes]
            known = all(w.changed(id) is not None and w.ended_well for w, _ in pairs)
            if id in moved or team.changed_later(id) or (model.shapes in shapes_moved and not model.outside) or not trained or not known or not model.trainable:
                continue
            found.append(Untouched(team, model, trained, bool(team.uses(id))))
    return found


def counted(things: Sequence[object], one: str, many: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else many}"
