"""Shares that are cut by the default of a launcher's variable, read from the source."""

from __future__ import annotations

import ast

import pytest

from harness.probe import launchervars

SET = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
FIELDS = """
@dataclass
class Place:
    task: int = field(default_factory=lambda: int(os.environ.get("SLURM_PROCID", 0)))
    tasks: int = int(os.getenv("SLURM_NTASKS") or 1)

class Corpus(IterableDataset):
    def __iter__(self):
        yield from self.order[self.place.task :: self.place.tasks]
"""
NAMES = """
def rank():
    return int(environ.get("OMPI_COMM_WORLD_RANK", "0"))

def shards(files, first, step):
    return list(islice(files, first, None, step))

def main():
    me, world = rank(), int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    return shards(FILES, me, step=world)
"""
TURNS = """
class Rows:
    def __init__(self):
        self.world = int(os.environ.get("SLURM_NTASKS", 1))
    def __iter__(self):
        for i, row in enumerate(ROWS):
            if i % self.world == dist.get_rank():
                yield row
"""
PLAIN = """
me = int(os.environ.get("SLURM_PROCID", 0))
rows = ROWS[me::2]
"""


def told(source: str) -> list[tuple[int, str, str, int]]:
    return [tuple(read) for read in launchervars.defaults_that_cut(ast.parse(source), launchervars.VARIABLES - SET)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        (FIELDS, [(4, "SLURM_PROCID", "0", 9), (5, "SLURM_NTASKS", "1", 9)]),
        (NAMES, [(3, "OMPI_COMM_WORLD_RANK", "0", 6), (9, "OMPI_COMM_WORLD_SIZE", "1", 6)]),
        (TURNS, [(4, "SLURM_NTASKS", "1", 7)]),
        (PLAIN, [(2, "SLURM_PROCID", "0", 3)]),
    ],
)
def test_reads_whose_default_cuts_a_share(source: str, reads: list[tuple[int, str, str, int]]) -> None:
    assert told(source) == reads
    assert told(source.replace("SLURM_PROCID", "RANK").replace("OMPI_COMM_WORLD_RANK", "RANK").replace("SLURM_NTASKS", "WORLD_SIZE")) != reads


@pytest.mark.parametrize(
    "source",
    [
        PLAIN.replace('"SLURM_PROCID", 0', '"RANK", os.environ.get("SLURM_PROCID", 0)'),
        PLAIN.replace('os.environ.get("SLURM_PROCID", 0)', 'os.environ["SLURM_PROCID"]'),
        PLAIN.replace("))", ")) if not dist.is_initialized() else dist.get_rank()"),
        PLAIN.replace("rows", "me = dist.get_rank()\nrows"),
        PLAIN.replace("me = ", "if 'SLURM_PROCID' in os.environ: me = "),
        PLAIN.replace("ROWS[me::2]", "'%d' % me, me % 4, list(range(me))"),  # a log, a device, no share
        PLAIN.replace("rows", "def main():\n    global me\n    me = dist.get_rank()\nrows"),
        PLAIN.replace("rows = ROWS[me::2]", "def cut(me):\n    return ROWS[me::2]\ncut(dist.get_rank())"),
        FIELDS + "place = Place(task=dist.get_rank(), tasks=2)",
        FIELDS + "place.task, place.tasks = 1, 2\nplace.task = 3\nplace.tasks = 4",
    ],
)
def test_reads_that_have_another_source_beside_them_or_cut_nothing(source: str) -> None:
    assert told(source) == []


LOADED = "\nloader = DataLoader(TensorDataset(rows), batch_size=16)"


@pytest.mark.parametrize(
    ("cut", "line"),
    [
        ("rows = ROWS[me::2]", 3),
        ("rows = [r for i, r in enumerate(ROWS) if i % 2 == me]", 3),
        ("rows = []\nfor i in range(me, 64, 2):\n    rows.append(ROWS[i])", 4),
        ("rows = []\nfor i, r in enumerate(ROWS):\n    if i % 2 != me:\n        continue\n    rows.append(r)", 5),
        ("def own():\n    yield from ROWS[me::2]\nrows = list(own())", 4),
        ("cores = CORES[me : me + 4]\npin(cores)\nrows = ROWS[me::2]", 5),  # the second is the share
        ("cores = CORES[me : me + 4]\npin(cores)\nrows = ROWS", 0),
        ("assert 64 % me == 1\nrows = ROWS", 0),
        ("if 64 % me == 0:\n    rows = ROWS", 0),
        ("if 64 % me:\n    raise ValueError\nrows = ROWS", 0),
    ],
)
def test_a_cut_counts_where_it_goes_into_the_data(cut: str, line: int) -> None:
    source = PLAIN.replace("rows = ROWS[me::2]", cut) + LOADED
    assert [read[3] for read in told(source)] == ([line] if line else [])
    assert told(source.replace("SLURM_PROCID", "SLURM_LOCALID")) == []
