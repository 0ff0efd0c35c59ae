# /// script
# requires-python = ">=3.11"
# dependencies = ["torch"]
#
# [tool.harness]
# nproc = 2
# device = "auto"
# timeout_s = 120
# summary = "checkpoints that load whatever wrapped the model: plain, DataParallel, DDP, compiled, and every nesting of them"
#
# [tool.harness.args]
# seed = "--seed {}"
# device = "--device {}"
#
# [tool.harness.expect]
# loss_falls = true
# ///
"""state_dict prefixes: `module.`, `_orig_mod.`, and how a checkpoint survives them.

What it proves: weights saved from a plain, DataParallel, DDP or compiled model, or any nesting of these, load into any other, strictly and
to the last bit; a partial load says what it left out; optimizer state finds its parameter by name, in whatever order the new optimizer
holds them; a checkpoint that was saved on a GPU loads on a CPU, without running code from the file; training goes on where it stopped.

How to run it bare:
    torchrun --standalone --nproc-per-node 2 state_dict_prefix.py
    python state_dict_prefix.py

What goes wrong in practice: the file has `module.0.weight`, the model wants `0.weight`, and somebody "fixes" the error with strict=False:
nothing is loaded, and training starts from noise without a word. `key.lstrip("module.")` strips a *set of letters* and eats into `dense` or
`embed`. `state_dict()` returns the live weights, not a copy: a "best" kept that way is always the latest. Optimizer state is stored by
position, so a reordered model gets the moments of another layer. A missing map_location puts every rank's weights on the GPU that saved
them. The cure for most: unwrap the model, save the bare one, and load strictly.
"""

import argparse
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PREFIXES = ("module.", "_orig_mod.")
State = dict[str, Tensor]


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


class TextNet(nn.Module):
    """Names on purpose: `dense`, `embed` and `module_list` all begin with letters of "module."."""

    def __init__(self, reordered: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        if reordered:  # a later version of the code: same names and shapes, other positions
            self.module_list = nn.ModuleList([nn.Linear(24, 24)])
            self.dense = nn.Linear(24, 24)
        else:
            self.dense = nn.Linear(24, 24)
            self.module_list = nn.ModuleList([nn.Linear(24, 24)])
        self.classifier = nn.Linear(24, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.relu(self.dense(self.embed(tokens).mean(1)))
        for layer in self.module_list:
            hidden = torch.relu(layer(hidden))
        return self.classifier(hidden)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module, whatever stands around it. By type: a user's submodule may be called `module` too."""
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # torch.compile(model); `model.compile()` adds no prefix and is the better habit
            model = model._orig_mod
        else:
            return model


def strip_prefixes(state: State) -> State:
    """For files of others: take wrapper prefixes off the front, any nesting, only where *every* key has them."""
    while prefix := next((prefix for prefix in PREFIXES if state and all(key.startswith(prefix) for key in state)), None):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def load_partly(net: nn.Module, state: State) -> tuple[list[str], list[str]]:
    """Fine-tuning: load what fits by name and shape, and say what did not. strict=False neither says it nor looks at shapes."""
    own = net.state_dict()
    fitting = {key: value for key, value in state.items() if key in own and own[key].shape == value.shape}
    net.load_state_dict({**own, **fitting})
    return sorted(fitting), sorted(own.keys() - fitting.keys())


def save_training(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> dict[str, Any]:
    net = unwrap(model)
    name_of = {parameter: name for name, parameter in net.named_parameters()}
    moments = {name_of[parameter]: values for parameter, values in optimizer.state.items()}
    return {"model": net.state_dict(), "moments": moments, "epoch": epoch}


def load_training(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> int:
    """Optimizer state by name. The state_dict of an optimizer goes by position, which silently fits another layer of the same shape."""
    net, moments = unwrap(model), saved["moments"]
    net.load_state_dict(saved["model"])
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    name_of = {parameter: name for name, parameter in net.named_parameters()}
    state = {position: moments[name_of[parameter]] for position, parameter in enumerate(order)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(saved["epoch"])


def wrappings(device: torch.device) -> dict[str, Callable[[nn.Module], nn.Module]]:
    ids = [device.index] if device.type == "cuda" else None

    def ddp(net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net, device_ids=ids)

    def dp(net: nn.Module) -> nn.Module:
        return DataParallel(net, device_ids=ids)

    def compiled(net: nn.Module) -> nn.Module:  # the wrapper that torch.compile(net) returns, without its 2 s of imports: here only
        return torch._dynamo.run(net)  # keys are looked at

    return {
        "plain": lambda net: net,
        "DataParallel": dp,
        "DDP": ddp,
        "compiled": compiled,
        "compiled DDP": lambda net: compiled(ddp(net)),
        "DDP of compiled": lambda net: ddp(compiled(net)),
        "compiled DataParallel of compiled": lambda net: compiled(dp(compiled(net))),
    }


def check_every_pair(device: torch.device) -> int:
    """Save from each, load into each: by the bare model, and from a file whose keys still carry the saver's prefixes."""
    models = {name: wrap(TextNet().to(device)) for name, wrap in wrappings(device).items()}
    files = {}
    for name, model in models.items():
        with torch.no_grad():
            unwrap(model).dense.weight.fill_(len(name))  # a mark by which the source is known
        torch.save(model.state_dict(), buffer := io.BytesIO())
        files[name] = buffer.getvalue()
    for source, content in files.items():
        state = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
        for name, model in models.items():
            unwrap(model).load_state_dict(strip_prefixes(state))
            mark = unwrap(model).dense.weight.mean().item()
            assert mark == len(source), f"{name} loaded from {source}: mark {mark}, expected {len(source)}"
    return len(files) ** 2


def check_gpu_file_on_cpu() -> str:
    """map_location is the only thing between a file that says cuda:0 and a machine that has none."""
    stand_in = not torch.cuda.is_available()
    weights = {"weight": torch.arange(4.0, device="cpu" if stand_in else "cuda")}
    with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):  # without a GPU: the file says cuda:0 all the same
        torch.save(weights, buffer := io.BytesIO())
    loaded = torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)["weight"]
    assert loaded.device.type == "cpu" and loaded.tolist() == [0, 1, 2, 3], f"expected [0, 1, 2, 3] on cpu, got {loaded}"
    return "GPU-saved file loads on CPU" + (" (stand-in: tensors of the CPU, tagged cuda:0)" if stand_in else "")


def topics(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 4, (count,), generator=draw)
    own_words = torch.randint(0, 10, (count, 5), generator=draw) + 10 * label.unsqueeze(1)
    return TensorDataset(torch.cat([own_words, torch.randint(0, 40, (count, 7), generator=draw)], dim=1), label)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: range, seed: int, device: torch.device) -> list[float]:
    """Returns the mean loss over all ranks, step by step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = topics(512, seed=1)
    sampler = DistributedSampler(dataset, world, rank, seed=seed)
    loader = DataLoader(dataset, batch_size=32 // world, sampler=sampler, drop_last=True)
    curve = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for tokens, label in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens.to(device)), label.to(device))
            loss.backward()
            optimizer.step()
            curve.append(loss.detach())
    losses = torch.stack(curve)
    dist.all_reduce(losses)
    return (losses / world).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description="state_dict prefixes", allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = start(args.device)
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    num_pairs, gpu_line = check_every_pair(device), check_gpu_file_on_cpu()

    temporary = tempfile.TemporaryDirectory(prefix="state_dict_prefix_") if rank == 0 else None
    box = [temporary.name if temporary else None]
    dist.broadcast_object_list(box, src=0)  # one folder for all: rank 0 made it
    path = Path(str(box[0])) / "epoch1.pt"
    wrap = wrappings(device)["DDP"]

    model = wrap(TextNet().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = train(model, optimizer, range(1), args.seed, device)
    first = {key: value.clone() for key, value in unwrap(model).state_dict().items()}  # without clone: the live weights, whatever the step
    before += train(model, optimizer, range(1, 2), args.seed, device)
    if rank == 0:
        torch.save({**save_training(model, optimizer, epoch=2), "first": first}, path)
    dist.barrier()  # nobody reads before rank 0 has written

    torch.manual_seed(args.seed + 100)  # a new job, other initial weights, a model whose layers stand in another order
    model = wrap(TextNet(reordered=True).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    saved = torch.load(path, map_location=device, weights_only=True)
    first_epoch = load_training(model, optimizer, saved)
    after = train(model, optimizer, range(first_epoch, 4), args.seed, device)

    tuned = TextNet().to(device)
    tuned.classifier = nn.Linear(24, 7).to(device)  # fine-tuning for seven classes, from epoch 0: the old head does not fit
    loaded, left = load_partly(tuned, saved["first"])
    assert left == ["classifier.bias", "classifier.weight"], f"all but the new head must be loaded: {len(loaded)} loaded, left {left}"
    assert after[-1] < 0.9 * before[0], f"loss must fall by 10 %: first step {before[0]:.4f}, last step {after[-1]:.4f}"
    dist.barrier()  # nobody removes the folder while another still reads
    if rank == 0:
        print(f"{num_pairs} pairs of wrappings load strictly; {gpu_line}")
        print(f"partial load: {len(loaded)} tensors loaded, left as they were: {', '.join(left)}")
        print(f"loss {before[0]:.4f} -> {before[-1]:.4f}, saved, loaded, {after[0]:.4f} -> {after[-1]:.4f}")
    if temporary is not None:
        temporary.cleanup()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
