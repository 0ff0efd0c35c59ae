"""What goes into a reduction, as the source shows it: metrics that are no means over samples, and what looks like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import nonlinear

# the call of the collective is marked #0, the call of the helper around it #1
SOURCES = {
    "library_call_through_a_helper": """
def mean(v):
    t = torch.tensor(v)
    dist.all_reduce(t)  #0
    return t / dist.get_world_size()
def evaluate(m):
    p, r, f, _ = precision_recall_fscore_support(y, pred)
    return mean(f)  #1
""",
    "stacked_with_an_accuracy": """
def ev():
    auc = roc_auc_score(y, s)
    acc = (p == y).mean()
    t = torch.tensor([acc, auc], device=dev)
    dist.all_reduce(t, op=dist.ReduceOp.AVG)  #0
""",
    "perplexity": """
def ev():
    loss = total_loss / n
    ppl = torch.exp(loss)
    dist.all_reduce(ppl)  #0
    return ppl / world
""",
    "own_function_of_counts": """
def score(tp, fp, fn):
    p = tp / (tp + fp)
    r = tp / (tp + fn)
    return 2 * p * r / (p + r)
def ev():
    tp = fp = fn = 0
    for x, y in loader:
        tp += ((m(x) > 0) & (y == 1)).sum().item()
        fp += ((m(x) > 0) & (y == 0)).sum().item()
        fn += ((m(x) <= 0) & (y == 1)).sum().item()
    val = score(tp, fp, fn)
    t = torch.tensor([val], device='cuda')
    dist.all_reduce(t)  #0
""",
    "confusion_matrix": """
def ev():
    hist = torch.zeros(3, 3)
    for x, y in loader:
        hist += torch.bincount(3 * y + m(x).argmax(1), minlength=9).view(3, 3)
    iou = hist.diag() / (hist.sum(0) + hist.sum(1) - hist.diag())
    miou = iou.mean()
    dist.all_gather_object(out, miou.item())  #0
""",
    "sum_of_labels_below": """
def ev():
    positives = (y == 1).sum()
    hits = ((pred == 1) & (y == 1)).sum()
    recall = hits.float() / positives
    dist.all_reduce(recall)  #0
""",
    "one_minus_a_quotient": """
def ev():
    ss_res = ((y - p) ** 2).sum()
    ss_tot = ((y - y.mean()) ** 2).sum()
    r2 = 1 - ss_res / ss_tot
    dist.all_reduce(r2)  #0
""",
    "accuracy": """
def ev():
    acc = correct / total
    dist.all_reduce(acc)  #0
""",
    "mean_over_a_mask": """
def ev():
    loss = (l * mask).sum() / mask.sum()
    dist.all_reduce(loss)  #0
""",
    "counts_before_the_quotient": """
def f1_eval():
    tp = (pred * y).sum()
    fp = (pred * (1 - y)).sum()
    counts = torch.stack([tp, fp])
    dist.all_reduce(counts)  #0
    return counts[0] / counts.sum()
""",
    "one_quotient_an_image": """
def dice_iou(p, t):
    inter = (p * t).sum(dim=(1, 2, 3))
    return (inter / ((p + t).sum(dim=(1, 2, 3)) - inter)).mean()
def ev():
    iou = dice_iou(p, t)
    dist.all_reduce(iou)  #0
""",
    "recall_at_k": """
def ev():
    recall_at_5 = hits.sum() / len(q)
    dist.all_reduce(recall_at_5)  #0
""",
    "accuracy_in_a_function_named_f1": """
def evaluate_f1():
    acc = correct.sum() / total
    dist.all_reduce(acc)  #0
""",
    "top_one": """
def ev():
    prec1 = topk(out, y)
    dist.all_reduce(prec1)  #0
""",
    "denominator_of_a_softmax": """
def ev():
    z = torch.exp(logits).sum()
    dist.all_reduce(z)  #0
""",
    "exp_after_the_mean": """
def ev():
    nll = total / tokens
    dist.all_reduce(nll)  #0
    ppl = nll.exp()
""",
    "weighted_by_samples": """
def ev():
    f1 = f1_score(y, p)
    t = torch.tensor([f1 * n, n])
    dist.all_reduce(t)  #0
""",
    "norm_of_gradients": """
def ev():
    norm = torch.sqrt(sum((p.grad ** 2).sum() for p in m.parameters()))
    dist.all_reduce(norm)  #0
""",
    "only_the_name": """
def ev():
    f1 = scorer(y, p)
    dist.all_reduce(f1)  #0
""",
}
FOUND = {
    "library_call_through_a_helper": "call",
    "stacked_with_an_accuracy": "call",
    "perplexity": "exp",
    "own_function_of_counts": "ratio",
    "confusion_matrix": "ratio",
    "sum_of_labels_below": "ratio",
    "one_minus_a_quotient": "ratio",
    "only_the_name": "name",
}


def look(source: str, folder: Path) -> dict[str, object] | None:
    file = folder / "train.py"
    file.write_text(source)
    lines = source.split("\n")
    frames = [(str(file), at, "") for mark in ("#0", "#1") for at, line in enumerate(lines, 1) if mark in line]
    gathers = "all_gather_object" in source
    return nonlinear.look(frames, "all_gather_object" if gathers else "all_reduce", int(gathers))


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_averaged(name: str, tmp_path: Path) -> None:
    found = look(SOURCES[name], tmp_path)
    assert (found or {}).get("how") == FOUND.get(name)


def test_place_among_what_is_given(tmp_path: Path) -> None:
    assert look(SOURCES["stacked_with_an_accuracy"], tmp_path) == {"metric": "auc", "how": "call", "index": 1}


def test_no_source() -> None:
    assert nonlinear.look([("", 0, "")], "all_reduce", 0) is None
    assert nonlinear.look([], "all_reduce", 0) is None


RETRIEVAL = """
class Metric:
    def update(self, t, c):
        self.text.append(t)
        self.code.append(c)
    def compute(self):
        t, c = torch.cat(self.text), torch.cat(self.code)
        gold = torch.arange(len(t))
        {before}
        sims = {product}
        place = (sims > sims.gather(1, gold[:, None])).sum(1)
        sums = torch.tensor([(place == 0).sum(), len(t)])
        dist.all_reduce(sums)  #0
"""


@pytest.mark.parametrize(
    ("before", "product", "line"),
    [
        ("gallery = c", "t @ gallery.T", 10),
        ("gallery = F.normalize(c, dim=1)", "torch.mm(t, gallery.t())", 10),
        ("", "-torch.cdist(t, c)", 10),
        ("", "t @ t.T", 10),
        ("gallery = torch.cat(all_gather(c))", "t @ gallery.T", 0),
        ("dist.all_gather(parts, c)", "t @ torch.cat(parts).T", 0),
        ("", "t.T @ c", 0),  # a sum over samples
        ("", "t @ self.head.weight.T", 0),
        ("", "t @ torch.cat(self.whole).T", 0),  # filled elsewhere: may be the whole set
    ],
)
def test_samples_that_meet_those_of_their_own_rank(before: str, product: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(RETRIEVAL.format(before=before or "pass", product=product))
    found = nonlinear.look_for_pairs([(str(file), 13, "compute")], "all_reduce", 0)
    assert (found[1] if found is not None else 0) == line


@pytest.mark.parametrize(
    ("behind", "divided"),
    [
        ("rt /= nprocs", True),
        ("return rt / dist.get_world_size()", True),
        ("rt.div_(world)", True),
        ("return rt.item() / args.world_size", True),
        ("return rt", False),
        ("return rt / len(loader)", False),
        ("x /= nprocs", False),
    ],
)
def test_divided_by_the_number_of_ranks(behind: str, divided: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"def reduce_mean(t, nprocs):\n    rt = t.clone()\n    dist.all_reduce(rt)\n    {behind}\n")
    assert nonlinear.divided_by_ranks((str(file), 3, ""), "all_reduce") is divided
