# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "each rank on a device of its own: CUDA_VISIBLE_DEVICES, LOCAL_RANK, device_ids, map_location, and the backend that fits"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""Which device is mine? LOCAL_RANK, CUDA_VISIBLE_DEVICES, and one device a rank.

What it proves: the rule that picks a rank's device is right for CPU, one GPU, N GPUs, a subset, another order, UUIDs, one visible GPU a
task, and refuses more ranks than GPUs (a stand-in table of devices, the same on every machine); on this machine all ranks of a host then
really have different devices, no rank opened a context on another's, the backend fits, DDP's device_ids fit, and a checkpoint comes back
on the device of the rank that loads it. Without a GPU the output says that only the stand-in table was tested.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 device_selection.py
    torchrun --standalone --nproc-per-node 2 device_selection.py --device cpu
    CUDA_VISIBLE_DEVICES=3,1 torchrun --standalone --nproc-per-node 2 device_selection.py
    python device_selection.py                             one process: the first GPU, MPS or XPU device, or the CPU

What goes wrong in practice: `.cuda()` or "cuda:0" everywhere (all ranks on GPU 0, which runs out of memory); RANK for LOCAL_RANK (right on
the first node, "invalid device ordinal" on the second); `--local-rank` from the old launcher, which torchrun does not pass, so that its
default pins all ranks to one place; a tensor made before `set_device` (a stray context: some hundred MiB on GPU 0 for each rank);
device_ids for a model on the CPU; a model moved after it was wrapped or given to an optimizer; nccl without a GPU; torch.load without
map_location (all ranks load onto the saver's GPU).
"""

import argparse
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# With a GPU, gloo too: objects and CPU tensors then need no device, and two ranks on one GPU can still tell each other so.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "mps": "gloo"}


def visible_devices(table: list[str], variable: str | None) -> list[str]:
    """CUDA's own rule: numbers or the beginnings of UUIDs, in the order given, up to the first one that does not exist."""
    if variable is None:
        return table
    found: list[str] = []
    for name in (part.strip() for part in variable.split(",")):
        by_number = name.isdigit() and int(name) < len(table)
        matches = [table[int(name)]] if by_number else [uuid for uuid in table if name and uuid.startswith(name)]
        if len(matches) != 1:
            break
        found += matches
    return found if len(set(found)) == len(found) else []


def choose_index(local_rank: int, local_world: int, num_visible: int) -> int | None:
    """LOCAL_RANK counts this node's ranks, and so do the devices that this process sees. RANK counts over all nodes."""
    if num_visible == 0:
        return None  # the CPU
    if num_visible == 1:
        return 0  # one rank; or a launcher that shows each task its own. Whether two ranks share it is asked of the ranks, below
    if num_visible < local_world:
        raise ValueError(f"{local_world} ranks on this node but {num_visible} GPUs: start at most {num_visible}, or use --device cpu")
    return local_rank


def check_stand_in_table() -> int:
    """(CUDA_VISIBLE_DEVICES, ranks on the node) -> the device of each rank, on a stand-in machine of four."""
    four = ["GPU-a1", "GPU-b2", "GPU-c3", "GPU-d4"]
    cases: list[tuple[list[str], list[str | None], list[str | None]]] = [
        ([], [None, None], [None, None]),  # no GPU: the CPU
        (four[:1], [None], ["GPU-a1"]),
        (four, [None, None], ["GPU-a1", "GPU-b2"]),
        (four, ["2,3"] * 2, ["GPU-c3", "GPU-d4"]),  # a subset: indices start at 0 all the same
        (four, ["3,1"] * 2, ["GPU-d4", "GPU-b2"]),  # another order
        (four, ["GPU-c,GPU-a1"] * 2, ["GPU-c3", "GPU-a1"]),  # UUIDs, or the beginning of one
        (four, ["2", "0"], ["GPU-c3", "GPU-a1"]),  # one visible a task, as srun does: index 0 for both, yet two devices
        (four, ["", ""], [None, None]),  # hidden: the CPU
        (four, ["1,9,2"], ["GPU-b2"]),  # ends at the first that does not exist
    ]
    for table, variables, expected in cases:
        chosen: list[str | None] = []
        for local_rank, variable in enumerate(variables):
            visible = visible_devices(table, variable)
            index = choose_index(local_rank, len(variables), len(visible))
            chosen.append(None if index is None else visible[index])
        assert chosen == expected, f"{len(table)} devices, CUDA_VISIBLE_DEVICES {variables}: expected {expected}, got {chosen}"
    try:
        index = choose_index(2, 3, 2)
    except ValueError:
        return len(cases) + 1
    raise AssertionError(f"3 ranks and 2 GPUs must be refused, rank 2 got device {index}")


def start(option: str) -> tuple[torch.device, bool]:
    """Choose, set, then make the process group. The second value: devices were counted, but tensors cannot live there (a stand-in)."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    num_visible = torch.cuda.device_count() if option in ("auto", "cuda") else 0  # asks the driver, opens no context
    if option == "cuda" and num_visible == 0:
        raise SystemExit("--device cuda: this process sees no GPU")
    index = choose_index(local_rank, local_world, num_visible)
    device = torch.device("cpu")
    if index is not None:
        torch.cuda.set_device(index)  # before anything else of CUDA: what runs earlier runs on device 0
        device = torch.device("cuda", index) if torch.cuda.is_available() else device
    elif option == "auto" and (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())  # XPU by rank; MPS has one device
    backend = BACKENDS[device.type]
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device, index is not None and device.type == "cpu"


def check_one_device_a_rank(device: torch.device) -> list[str]:
    """By (host, UUID): two ranks with index 0 may have different devices, and two with different indices never see the same one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"cpu process {os.getpid()}"
    places: list[tuple[str, str]] = [("", "")] * world
    dist.all_gather_object(places, (socket.gethostname(), uuid))
    hosts = sorted({host for host, _ in places})
    groups = [dist.new_group([r for r in range(world) if places[r][0] == host]) for host in hosts]  # every rank makes all of them
    dist.all_reduce(here := torch.ones(1), group=groups[hosts.index(places[rank][0])])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    assert int(here) == local_world, f"LOCAL_WORLD_SIZE says {local_world} ranks, {int(here)} are on {places[rank][0]}"
    assert len(set(places)) == world, f"{world} ranks must have {world} devices, they have {len(set(places))}: {places}"
    if device.type == "cuda":
        contexts = [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]
        assert contexts == [device.index], f"rank {rank} must hold a context on {device.index} alone, it holds {contexts}"
    return [f"{host}: {uuid}" for host, uuid in places]


def make_data(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 24, generator=draw)
    return TensorDataset(x, torch.tanh(x[:, :3].sum(1, keepdim=True)))


def train(device: torch.device, seed: int) -> tuple[nn.Module, list[float]]:
    """Returns the net and the mean loss over all ranks, step by step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 1))
    net.to(device)  # first moved, then wrapped, then given to an optimizer
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    dataset = make_data(384, seed=1)
    sampler = DistributedSampler(dataset, world, rank, seed=seed)
    loader = DataLoader(dataset, batch_size=32 // world, sampler=sampler, drop_last=True, pin_memory=device.type == "cuda")
    curve: list[Tensor] = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            loss.backward()
            optimizer.step()
            curve.append(loss.detach())
    losses = torch.tensor([loss.item() for loss in curve], device=device)  # waits for the device once, at the end
    dist.all_reduce(losses)
    return net, (losses / world).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description="one device a rank", allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_cases = check_stand_in_table()
    device, stand_in = start(args.device)
    rank = dist.get_rank()
    places = check_one_device_a_rank(device)

    net, losses = train(device, args.seed)

    temporary = tempfile.TemporaryDirectory(prefix="device_selection_") if rank == 0 else None
    box = [temporary.name if temporary else None]
    dist.broadcast_object_list(box, src=0)
    path = Path(str(box[0])) / "net.pt"
    if rank == 0:
        torch.save(net.state_dict(), path)
    dist.barrier()  # nobody reads before rank 0 has written
    loaded = torch.load(path, map_location=device, weights_only=True)
    homes = {str(tensor.device) for tensor in loaded.values()}
    assert homes == {str(device)}, f"rank {rank} must find its weights on {device}, they are on {homes}"
    dist.barrier()  # nobody removes the folder while another still reads
    if temporary is not None:
        temporary.cleanup()
    if rank == 0:
        real = "devices of a stand-in, tensors on the CPU" if stand_in else "no GPU: only the stand-in table was tested"
        print(f"{num_cases} cases of the stand-in table right; on this machine: {real if device.type == 'cpu' else device.type}")
        print(f"{dist.get_backend()} over", ", ".join(places))
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
