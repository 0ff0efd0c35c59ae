# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "every test sample once, exact metrics over all ranks, decisions that all ranks share"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Evaluation on N ranks: each sample once, metrics that do not depend on N, one decision for all.

What it proves: a test set that does not divide by the ranks is read exactly once; accuracy, loss and a confusion matrix come from sums over
the ranks and equal those of the gathered predictions, in the order of the test set, so that any metric (here the macro F1) is exact; the
learning rate, early stopping and the choice of the best weights rest on the global validation loss and fall alike on every rank.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 distributed_evaluation.py
    python distributed_evaluation.py                       a world of one, the same code

What goes wrong in practice: DistributedSampler pads the test set, and the padded samples count twice; rank 0 prints its own share's score;
gathered predictions, one part behind the other, meet labels in the order of the set; a mean of the ranks' means where shares are unequal; a
sum that nobody divides; a missing no_grad, with the graph of the whole test set kept in one running total; `train()` or `eval()` forgotten;
one rank stops early and the others wait for it; `best = net.state_dict()`, which is no copy: it trains on with the net.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

FEATURES, CLASSES = 10, 5


def start(device_option: str) -> torch.device:
    """Join the job that torchrun made, or be a job of one under plain `python`. NCCL needs a GPU for each rank; else gloo on the CPU."""
    local_rank, local_world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    enough_gpus = torch.cuda.device_count() >= local_world_size
    if device_option == "cuda" and not enough_gpus:
        raise SystemExit(f"--device cuda: {local_world_size} ranks on this node, {torch.cuda.device_count()} GPUs")
    device = torch.device("cuda", local_rank) if enough_gpus and device_option != "cpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def samples(count: int, seed: int) -> TensorDataset:
    """Points whose class is the largest of five pair sums; one label in ten is wrong, so that scores stay below 1."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=draw)
    labels = x.view(count, CLASSES, -1).sum(2).argmax(1)
    wrong = torch.rand(count, generator=draw) < 0.1
    return TensorDataset(x, torch.where(wrong, torch.randint(CLASSES, (count,), generator=draw), labels))


def share_of(data: TensorDataset) -> Subset[tuple[Tensor, ...]]:
    """Every world_size-th sample: no padding, so shares may differ by one sample, and nothing below may assume otherwise."""
    return Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))


@torch.no_grad()
def validate(net: nn.Module, data: TensorDataset, device: torch.device) -> tuple[float, float]:
    """Global loss and accuracy, from sums; the same numbers on every rank, so every rank may decide by them."""
    loader = DataLoader(share_of(data), batch_size=32)
    totals = torch.zeros(3, device=device)
    net.eval()
    for x, y in loader:
        logits, y = net(x.to(device)), y.to(device)
        loss_sum = F.cross_entropy(logits, y, reduction="sum")
        totals += torch.stack([loss_sum, (logits.argmax(1) == y).sum(), torch.tensor(len(y), device=device)])
    dist.all_reduce(totals)
    return float(totals[0] / totals[2]), float(totals[1] / totals[2])


def gather_by_turns(mine: Tensor, num_samples: int) -> Tensor:
    """The values of all ranks in the order of the set. A gather wants equal lengths: the last turn is padded, and the padding cut off."""
    world_size = dist.get_world_size()
    num_turns = -(-num_samples // world_size)
    parts = [mine.new_empty(num_turns) for _ in range(world_size)]
    dist.all_gather(parts, F.pad(mine, (0, num_turns - len(mine))))
    return torch.stack(parts, dim=1).flatten()[:num_samples]  # the samples were dealt out by turns


@torch.no_grad()
def predict(net: nn.Module, data: TensorDataset, device: torch.device) -> Tensor:
    """The predictions for the whole set, in its order, on every rank."""
    share = share_of(data)
    net.eval()
    mine = torch.cat([net(x.to(device)).argmax(1) for x, _ in DataLoader(share, batch_size=32)])
    predictions = gather_by_turns(mine, len(data))
    order = gather_by_turns(torch.tensor(list(share.indices), device=device), len(data)).tolist()
    assert order == list(range(len(data))), f"each of {len(data)} samples must be read once, in order; read: {order[:8]}, ..."
    return predictions


def confusion(predictions: Tensor, labels: Tensor) -> Tensor:
    """Row: the label; column: the prediction. A table of counts adds up over ranks; rates do not."""
    return torch.bincount(labels * CLASSES + predictions, minlength=CLASSES**2).view(CLASSES, CLASSES)


def macro_f1(table: Tensor) -> float:
    """The mean of the classes' F1: not a mean over samples, so it can only be had from the global table."""
    return float((2 * table.diag() / (table.sum(0) + table.sum(1)).clamp(min=1)).mean())


def report_test(net: nn.Module, data: TensorDataset, device: torch.device) -> None:
    predictions, labels = predict(net, data, device), data.tensors[1].to(device)
    mine = torch.tensor(list(share_of(data).indices), device=device)
    table = confusion(predictions[mine], labels[mine])
    dist.all_reduce(table)
    assert int(table.sum()) == len(data), f"the ranks' tables hold {int(table.sum())} samples, the test set has {len(data)}"
    exact, summed = macro_f1(confusion(predictions, labels)), macro_f1(table)
    assert exact == summed, f"macro F1 is {exact} from the gathered predictions and {summed} from the summed tables"
    if dist.get_rank() == 0:
        print(f"test: accuracy {float(table.diag().sum()) / len(data):.4f}, macro F1 {summed:.4f} over {len(data)} samples", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="evaluation over ranks", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better validation loss before training stops")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    device = start(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, validation_set, test_set = samples(256, args.seed + 1), samples(171, args.seed + 2), samples(203, args.seed + 3)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=64 // world_size, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, CLASSES)).to(device)
    model = DistributedDataParallel(net, [device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=1)
    torch.manual_seed(1000 * args.seed + rank)  # equal weights, but dropout masks of their own

    best_loss, best_epoch, best = float("inf"), 0, {}
    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        loss_sum = torch.zeros((), device=device)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        losses.append(loss_sum.item() / len(loader) / world_size)
        validation_loss, accuracy = validate(net, validation_set, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}, validation loss {validation_loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        schedule.step(validation_loss)  # one number for all, or the ranks' learning rates part
        if validation_loss < best_loss:
            best_loss, best_epoch = validation_loss, epoch
            best = {name: value.clone() for name, value in net.state_dict().items()}
        elif epoch - best_epoch >= args.patience:
            break  # on all ranks in the same epoch, because they compare the same number

    net.load_state_dict(best)
    report_test(net, test_set, device)
    assert len(losses) < 3 or losses[-1] < losses[0], f"the loss must fall: {losses[0]:.4f} in epoch 0, {losses[-1]:.4f} at the end"

    dist.destroy_process_group()  # not in a `finally`: a failing rank must not make its peers report a lost connection first


if __name__ == "__main__":
    main()
