# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "BatchNorm on N ranks: whose statistics, SyncBatchNorm, buffers before evaluation, train and eval mode"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""BatchNorm under DDP: every replica normalises by its own share of the batch, unless you say otherwise.

What it proves: the ranks' sums, squares and counts combine exactly to the statistics of the global batch (this is what SyncBatchNorm
does); averaged before evaluation, the running statistics are the same on all ranks; a net in eval mode leaves them alone. On GPUs the net
is converted to SyncBatchNorm; torch has no CPU kernel for it, so there the scenario trains with plain BatchNorm and says so.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 batchnorm.py
    python batchnorm.py                                    a world of one, the same code

What goes wrong in practice: running statistics differ by rank, so that the score depends on who evaluates and the checkpoint on who
saves; `eval()` forgotten before the test (the test batch normalises itself and moves the statistics); `train()` forgotten after it (the
net trains on frozen statistics); one rank in eval mode; a scale that is replaced after the optimizer was built; a share of two or three
samples, whose variance is noise: then SyncBatchNorm or GroupNorm.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

FEATURES, CLASSES = 12, 3


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
    """Points of unlike scale, which a net without normalisation learns slowly."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(3.0 + x * torch.logspace(-1, 1, FEATURES), x.view(count, CLASSES, -1).sum(2).argmax(1))


class Net(nn.Module):
    """A residual block whose last scale starts at zero: at first the block is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.bn_in = nn.BatchNorm1d(FEATURES)
        self.stem = nn.Linear(FEATURES, 32)
        self.fc = nn.Linear(32, 32, bias=False)  # no bias: the normalisation that follows would remove it
        self.bn = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(self.bn_in(x)))
        out: Tensor = self.head(x + torch.tanh(self.bn(self.fc(x))))
        return out


def prove_statistics(data: TensorDataset, rank: int, world_size: int, device: torch.device) -> None:
    """Sums, squares and counts add up over the ranks to the variance of the whole; the mean of the ranks' variances does not."""
    whole = data.tensors[0].double().to(device)
    share = whole[rank::world_size]
    sums = torch.stack([share.sum(0), share.square().sum(0), torch.full_like(share[0], len(share))])
    dist.all_reduce(sums)
    combined = sums[1] / sums[2] - (sums[0] / sums[2]).square()
    error = float((combined - whole.var(0, correction=0)).abs().max())
    assert error < 1e-9, f"variance from the shares differs from the whole batch's by {error:.1e}, allowed 1e-09"


@torch.no_grad()
def average_statistics(net: nn.Module) -> None:
    """DDP copies rank 0's statistics to all at each forward, then every rank moves its own: at rest they differ, so take the mean."""
    for name, buffer in net.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
            spread = buffer.clone()
            dist.all_reduce(spread, op=dist.ReduceOp.MAX)
            assert torch.equal(spread, buffer), f"{name}: {float(buffer.mean())} here, {float(spread.mean())} on another rank"


@torch.no_grad()
def evaluate(net: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    """The accuracy over the whole test set, each sample read by one rank."""
    totals = torch.zeros(2, device=device)
    average_statistics(net)
    before = [buffer.clone() for buffer in net.buffers()]
    net.eval()
    for x, y in DataLoader(Subset(test_set, range(dist.get_rank(), len(test_set), dist.get_world_size())), batch_size=32):
        y = y.to(device)
        totals += torch.stack([(net(x.to(device)).argmax(1) == y).sum(), torch.tensor(len(y), device=device)])
    moved = sum(not torch.equal(a, b) for a, b in zip(before, net.buffers(), strict=True))
    assert net.training or moved == 0, f"{moved} of {len(before)} statistics moved in eval mode, allowed 0"
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="BatchNorm under DDP", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    device = start(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, test_set = samples(192 * world_size, args.seed), samples(151, args.seed + 1)
    prove_statistics(train_set, rank, world_size, device)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    net: nn.Module = Net().to(device)
    nn.init.zeros_(net.get_parameter("bn.weight"))  # in place, and before the optimizer: it holds the tensors, not their names
    if device.type == "cuda":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    elif rank == 0:
        print("SyncBatchNorm: not applicable on the CPU, plain BatchNorm is trained", flush=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    model = DistributedDataParallel(net, [device.index] if device.type == "cuda" else None)

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
        accuracy = evaluate(net, test_set, device)
        dist.all_reduce(loss_sum)
        losses.append(loss_sum.item() / len(loader) / world_size)
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {accuracy:.3f}", flush=True)
    assert args.epochs < 3 or losses[-1] < losses[0], f"the loss must fall: {losses[0]:.4f} in epoch 0, {losses[-1]:.4f} at the end"

    restored = Net().to(device)
    restored.load_state_dict(net.state_dict())  # parameters and statistics: without these it would normalise by mean 0 and variance 1
    accuracy = evaluate(restored, test_set, device)
    if rank == 0:
        print(f"restored from its state: test accuracy {accuracy:.3f}", flush=True)

    dist.destroy_process_group()  # not in a `finally`: a failing rank must not make its peers report a lost connection first


if __name__ == "__main__":
    main()
