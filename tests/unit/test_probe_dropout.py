"""F.dropout without `training=` in a module that is in eval mode; torch itself is asked, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = '''
import sys, types, json
sys.path.insert(0, ROOT)
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness.probe.state import S
from harness.probe.sensors import dropout

events = []
S.recorder = types.SimpleNamespace(disabled=False, errors=0, event=lambda kind, site, **fields: events.append((site[1], fields["module"])))
dropout.arm()

class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.drop = how, nn.Dropout(0.5)
    def forward(self, x):
        if self.how == "default": x = F.dropout(x, 0.5)
        if self.how == "said": x = F.dropout(x, 0.5, training=True)
        if self.how == "follows": x = F.dropout(x, 0.5, self.training)
        return self.drop(x)

x = torch.ones(4)
for how in ("default", "said", "follows"):
    net = Net(how)
    net(x)
    net.eval()(x)
    with torch.no_grad():
        net(x)
        net(x)
print(json.dumps(events))
'''


def test_only_the_default_in_an_evaluation_is_told_and_once(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("ROOT", repr(str(Path(__file__).parents[2]))))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=True)
    line = SCRIPT.splitlines().index('        if self.how == "default": x = F.dropout(x, 0.5)') + 1
    assert json.loads(done.stdout) == [[line, "Net"]]
