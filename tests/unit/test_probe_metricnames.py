"""Which way the value that a schedule is given gets better, as its name says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import metricnames


def better(tmp_path: Path, body: str) -> str:
    path = tmp_path / "train.py"
    path.write_text("def fit(sched, net, loader, np, torch, metrics, n):\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    return metricnames.better(str(path), 1 + len(body.splitlines()))


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("val_acc = accuracy(net, loader)\nsched.step(val_acc)", "higher"),
        ("sched.step(metrics['val_f1'])", "higher"),
        ("sched.step(metrics=float(np.mean(metrics.get('top1Accuracy'))))", "higher"),
        ("loss, valAUC = evaluate(net)\nsched.step(valAUC.item())", "higher"),
        ("hits = 3\nsched.step(accuracy(net, loader))", "higher"),
        ("testloss = 0\ntestloss += criterion(net)\nsched.step(testloss / n)", "lower"),
        ("sched.step(round(metrics.val_perplexity, 3))", "lower"),
        ("score = evaluate(net)\nsched.step(score)", ""),
        ("sched.step(1 - acc)", ""),
        ("sched.step(-loss)", ""),
        ("loss = -elbo(net)\nsched.step(loss)", ""),
        ("neg_loss = f(net)\nsched.step(neg_loss)", ""),
        ("dice_loss = f(net)\nsched.step(dice_loss)", ""),
        ("acc = 0\nacc += loss.item()\nsched.step(acc / n)", ""),
        ("acc = evaluate(net)[1] - best\nsched.step(acc)", ""),
        ("sched.step(d_loss)", ""),
        ("sched.step()", ""),
    ],
)
def test_names(tmp_path: Path, body: str, wanted: str) -> None:
    assert better(tmp_path, body) == wanted
