"""What a script's source tells about preloading."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.launch import preload
from harness.launch.pool import shadowed


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / "train.py"


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("print(1)", ()),
        ("import torch", ("torch",)),
        ("import torch\nfrom torch import optim", ("torch", "torch._dynamo")),
        ("import torch.nn as nn\nmodel = torch.compile(model)", ("torch", "torch._dynamo")),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", ("torch", "torch._dynamo")),
        ("from torchvision import transforms", ("torchvision",)),
        ("def f():\n    import numpy as np\n    import torch", ("torch", "numpy")),
        ("import pandas, transformers", ()),
        ("from . import torch", ()),
        ("import torch = 3", ()),
    ],
)
def test_only_allowed_modules_that_the_source_imports(tmp_path: Path, source: str, modules: tuple[str, ...]) -> None:
    assert preload.modules(write(tmp_path, train=source)) == modules


def test_the_users_own_modules_are_read_not_preloaded(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "__init__.py").write_text("from torchvision import models")
    script = write(tmp_path, train="import torch\nfrom nets import build\nimport data", data="import numpy\nimport train")
    assert preload.modules(script) == ("torch", "numpy", "torchvision")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch", "OMP_NUM_THREADS"),
        ("import os\nos.environ.setdefault('MKL_NUM_THREADS', '2')", "MKL_NUM_THREADS"),
        ("from os import environ\nenviron['TORCH_LOGS'] = '+dynamo'", "TORCH_LOGS"),
        ("import os\nos.putenv('KMP_AFFINITY', 'none')", "KMP_AFFINITY"),
        ("import os\nos.environ['MASTER_ADDR'] = 'localhost'", ""),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nos.environ['NCCL_DEBUG'] = 'INFO'", ""),
        ("import os\nfrom torch import nn\ndef main():\n    os.environ['OMP_NUM_THREADS'] = '2'", ""),
        ("import os\ndef main():\n    os.environ['OMP_NUM_THREADS'] = '2'\nmain()\nimport torch", "OMP_NUM_THREADS"),
        ("import os\ndef main():\n    import torch\n    os.environ['OMP_NUM_THREADS'] = '2'", "OMP_NUM_THREADS"),
        ("import os\nimport torch\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = 'x'", "TORCHINDUCTOR_CACHE_DIR"),
        ("import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ.get('MKL_NUM_THREADS'))", ""),
    ],
)
def test_a_script_that_sets_what_is_read_at_import(tmp_path: Path, source: str, name: str) -> None:
    obstacle = preload.obstacle(write(tmp_path, train=source))
    assert obstacle == (f"train.py sets {name}, which is read when torch is imported" if name else "")


def test_a_folder_cannot_be_warm(tmp_path: Path) -> None:
    assert preload.obstacle(tmp_path).endswith("is not a file")


def test_a_neighbour_that_bears_the_name_of_a_loaded_module(tmp_path: Path) -> None:
    write(tmp_path, train="", random="", helpers="")
    (tmp_path / "numpy").mkdir()
    modules = {"random", "numpy", "torch", "__main__"}
    assert shadowed(str(tmp_path), modules) == "random.py beside the script bears the name of a module that torch uses"
    (tmp_path / "random.py").unlink()
    assert shadowed(str(tmp_path), modules) == ""  # a folder without __init__.py does not hide an installed package
    (tmp_path / "numpy" / "__init__.py").touch()
    assert shadowed(str(tmp_path), modules).startswith("numpy beside")
