# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "one line, one file, one writer: global metrics by all ranks, printing and saving by rank 0"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Who prints, who writes, who saves: rank-0 work in a job of many ranks.

What it proves: one line an epoch on the console, one CSV row, one checkpoint, whatever the number of ranks; the numbers in them are those
of the whole data, not of one shard; the checkpoint is complete before anybody reads it; every rank still has a log file of its own, for
the day on which one of them misbehaves.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 rank0_logging.py
    torchrun --standalone --nproc-per-node 2 rank0_logging.py --out runs/a --tensorboard      needs the tensorboard package
    python rank0_logging.py

What goes wrong in practice: a collective inside `if rank == 0` (the others never call it: hang); every rank prints or appends to one
file (N copies, in random order); rank 0 logs the loss of its own shard as if it were the loss; early stopping decided by each rank from
its own numbers (one leaves the loop, the other waits for ever); every rank saves to one path (a file that mixes two writers, and loads);
a rank reads the checkpoint while rank 0 still writes it.
"""

import argparse
import csv
import logging
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def start(device_option: str) -> torch.device:
    """Join the job that torchrun made, or be a job of one under plain `python`. NCCL needs a GPU for each rank; else gloo on the CPU."""
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    enough_gpus = torch.cuda.device_count() >= local_world
    if device_option == "cuda" and not enough_gpus:
        raise SystemExit(f"--device cuda: {local_world} ranks on this node, {torch.cuda.device_count()} GPUs")
    device = torch.device("cuda", local_rank) if enough_gpus and device_option != "cpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def share_folder(out: str | None) -> tuple[Path, tempfile.TemporaryDirectory[str] | None]:
    """Rank 0 makes the folder and tells the others its name: a name made from the clock or at random would differ by rank."""
    temporary = tempfile.TemporaryDirectory(prefix="rank0_logging_") if dist.get_rank() == 0 and out is None else None
    box = [temporary.name if temporary else out]
    dist.broadcast_object_list(box, src=0)
    folder = Path(str(box[0]))
    folder.mkdir(parents=True, exist_ok=True)  # needed on every node, harmless where it exists
    return folder, temporary


def open_rank_log(folder: Path, rank: int) -> logging.Logger:
    """Every rank writes, each to its own file. The console stays with rank 0."""
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = logging.FileHandler(folder / f"rank-{rank}.log")
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank}: %(message)s"))
    logger.addHandler(handler)
    return logger


def two_moons(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    angle = torch.pi * (torch.rand(count, generator=draw) + label)
    points = torch.stack([angle.cos() + label, angle.sin() + 0.5 * label], dim=1)
    return TensorDataset(points + 0.1 * torch.randn(count, 2, generator=draw), label)


@torch.no_grad()
def evaluate(net: nn.Module, test_set: TensorDataset, device: torch.device) -> tuple[float, float]:
    """Each rank measures its share, all ranks add up: loss and accuracy of the whole set, the same number on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = Subset(test_set, range(rank, len(test_set), world))  # not a DistributedSampler, which would count padded samples twice
    net.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples: sums, so that uneven shares weigh right
    for x, y in DataLoader(share, batch_size=32):
        output, y = net(x.to(device)), y.to(device)
        num_samples = torch.tensor(len(y), device=device)
        totals += torch.stack([F.cross_entropy(output, y, reduction="sum"), (output.argmax(1) == y).sum(), num_samples])
    net.train()
    dist.all_reduce(totals)
    loss_sum, num_correct, num_tested = totals.tolist()
    return loss_sum / num_tested, num_correct / num_tested


def save(net: nn.Module, epoch: int, path: Path) -> None:
    """Called by rank 0 alone. Written beside the target, then renamed: a reader sees the old file or the new one, never half of one."""
    torch.save({"model": net.state_dict(), "epoch": epoch}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="rank-0 logging and saving", allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--patience", type=int, default=2, help="stop after that many epochs without a better test loss")
    parser.add_argument("--out", help="folder for logs and the checkpoint; default: a temporary one, removed at the end")
    parser.add_argument("--tensorboard", action="store_true", help="write event files too (needs the tensorboard package)")
    args = parser.parse_args()
    device = start(args.device)
    rank, world = dist.get_rank(), dist.get_world_size()
    folder, temporary = share_folder(args.out)
    rank_log = open_rank_log(folder, rank)
    rank_log.info("pid %d on %s, world size %d", os.getpid(), device, world)
    writer = None
    if args.tensorboard and rank == 0:  # one writer: two in one folder make a broken event file
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder))

    torch.manual_seed(args.seed)
    train_set, test_set = two_moons(512, seed=1), two_moons(201, seed=2)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(train_set, world, rank, seed=args.seed)
    loader = DataLoader(train_set, batch_size=32 // world, sampler=sampler, drop_last=True)

    best, best_epoch, history = float("inf"), 0, []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros((), device=device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()  # stays on the device: item() would wait for the GPU at every step
        rank_log.info("epoch %d: mean loss of this rank's shard %.4f", epoch, loss_sum.item() / len(loader))

        dist.all_reduce(loss_sum)  # every rank calls it, though only rank 0 will print
        train_loss = loss_sum.item() / (len(loader) * world)
        test_loss, accuracy = evaluate(net, test_set, device)
        history.append(train_loss)
        if rank == 0:
            print(f"epoch {epoch}: train loss {train_loss:.4f}, test loss {test_loss:.4f}, accuracy {accuracy:.3f}", flush=True)
            with (folder / "metrics.csv").open("a", newline="") as file:
                csv.writer(file).writerow([epoch, f"{train_loss:.6f}", f"{test_loss:.6f}", f"{accuracy:.6f}"])
        if writer is not None:
            writer.add_scalar("loss/train", train_loss, epoch)
            writer.add_scalar("loss/test", test_loss, epoch)

        improved = test_loss < best  # a number that all ranks share, so all take the same branch
        best, best_epoch = (test_loss, epoch) if improved else (best, best_epoch)
        if improved and rank == 0:
            save(net, epoch, folder / "best.pt")
        if epoch - best_epoch >= args.patience:
            break
    if writer is not None:
        writer.close()

    dist.barrier()  # nobody reads the checkpoint before rank 0 has written it
    checkpoint = torch.load(folder / "best.pt", map_location=device, weights_only=True)
    net.load_state_dict(checkpoint["model"])
    reloaded, _ = evaluate(net, test_set, device)

    rows = (folder / "metrics.csv").read_text().splitlines()
    rank_logs = sorted(path.name for path in folder.glob("rank-*.log"))
    if rank == 0:
        print(f"{len(rows)} rows in metrics.csv, {len(rank_logs)} rank logs, best test loss {best:.4f}, reloaded {reloaded:.4f}")
        assert checkpoint["epoch"] == best_epoch, f"best.pt must be of epoch {best_epoch}, it says {checkpoint['epoch']}"
        assert len(rows) >= len(history), f"metrics.csv must hold a row an epoch: {len(rows)} rows, {len(history)} epochs"
    assert history[-1] < 0.5 * history[0], f"loss must halve: first epoch {history[0]:.4f}, last {history[-1]:.4f}"
    dist.barrier()  # nobody removes the folder while another still reads
    if temporary is not None:
        temporary.cleanup()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
