"""What torch's best known error texts mean in a distributed script, and the edit for each.

The exception names what went wrong inside torch; the mistake is often elsewhere. A row says only what follows from the text alone:
causes that need the recording are in causes.py. `tests/unit/test_known_errors.py` makes torch raise the texts, so that a new torch that
words one differently is seen.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Known(NamedTuple):
    pattern: str  # searched in "Type: message"
    means: str
    help: str


KNOWN = (
    # ---- processes and the group
    Known(
        r"start a new process before the\s+current process has finished its bootstrapping",
        'the file starts processes while it is imported: "spawn" imports it again in each child, which starts processes again',
        'put the call that starts the processes, and all that only the parent does, under `if __name__ == "__main__":`',
    ),
    Known(
        r"Can't (pickle|get) local object|Can't pickle <function <lambda>",
        'a process that is started by "spawn" or "forkserver" gets its function and arguments pickled; a function inside a function and a lambda cannot be',
        "move it to the top level of the file and pass what it closes over as arguments (functools.partial of a top-level function works)",
    ),
    Known(
        r"Cowardly refusing to serialize non-leaf tensor",
        "a tensor that is part of an autograd graph was sent to another process: the graph cannot follow it",
        "send `tensor.detach()` (and `.clone()` where the sender goes on writing into it)",
    ),
    Known(
        r"Cannot re-initialize CUDA in forked subprocess",
        "CUDA was used in the parent before it forked; a forked child cannot use the parent's context",
        'start the processes with "spawn" (`mp.spawn`, `mp.get_context("spawn")`, DataLoader(multiprocessing_context="spawn")), or touch no GPU before',
    ),
    Known(
        r"environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK) expected, but not set"
        r"|KeyError: '(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)'",
        "the variables that torchrun sets are not there: this process was not started by it, or the script starts its own processes and must set them itself",
        "start it with torchrun (or `harness run`); where the script spawns, pass rank, world_size and init_method to init_process_group()",
    ),
    Known(
        r"ProcessGroupNCCL is only supported with GPUs|No backend type associated with device type|"
        r"Distributed package doesn't have NCCL",
        "the backend does not serve the device of the tensors: nccl is for CUDA tensors, gloo for CPU tensors",
        'choose it by the device: `backend = "nccl" if torch.cuda.is_available() else "gloo"`',
    ),
    Known(
        r"gather_list`* must NOT be specified on non-destination|scatter_list`* must NOT be specified on non-source",
        "the list belongs to one rank only: the destination of a gather, the source of a scatter",
        "pass it where `dist.get_rank() == dst`, and None on the other ranks",
    ),
    Known(
        r"gather_list`* must be specified on destination|scatter_list`* must be specified on source",
        "the rank that gathers (or scatters) has to pass the list",
        "`gather_list=[torch.empty_like(t) for _ in range(world_size)] if rank == dst else None`",
    ),
    Known(
        r"Global rank \d+ is not part of group|[Ii]nvalid root rank",
        "src and dst are global ranks, and have to be members of the group that is passed",
        "pass a global rank of that group (`dist.get_global_rank(group, i)`), or group_src/group_dst",
    ),
    Known(
        r"invalid output tensor list at index \d+ \(expected length",
        "the list to gather into has to hold one tensor for each rank of the group",
        "`[torch.empty_like(t) for _ in range(dist.get_world_size(group))]`",
    ),
    Known(
        r"mixed torch\.Tensor and DTensor",
        "parameters of FSDP2 and of tensor parallelism are DTensors; a plain tensor takes part in the same operation",
        "keep it inside the forward of the wrapped module, or use `p.to_local()` / `p.full_tensor()`",
    ),
    # ---- DistributedDataParallel
    Known(
        r"Expected to mark a variable ready only once",
        "the gradient of one parameter was ready twice in a backward: a re-entrant activation checkpoint, or a layer that two of them share",
        "`checkpoint(..., use_reentrant=False)`; one forward through the DDP object and one backward a step",
    ),
    Known(
        r"Your training graph has changed in this iteration",
        "static_graph=True promises that each step uses the same parameters, and this one used others",
        "leave static_graph out; where parameters go unused in some steps, pass find_unused_parameters=True",
    ),
    Known(
        r"Expected to have finished reduction in the prior iteration",
        "parameters that DDP waits for got no gradient: not used, frozen or replaced after the wrapping, or left out of the loss",
        "wrap the model last, when its parameters are final; use all of them, or pass find_unused_parameters=True",
    ),
    Known(
        r"DistributedDataParallel is not needed when a module doesn't have any parameter",
        "all parameters are frozen when the model is wrapped, or it has none",
        "set requires_grad before the wrapping; leave a module that is not trained unwrapped",
    ),
    Known(
        r"'(DistributedDataParallel|DataParallel|OptimizedModule|FullyShardedDataParallel)' object has no attribute",
        "the wrapper is not the model: its methods and attributes are on the module inside",
        "`model.module.name` (for a compiled model `model._orig_mod.name`); keep the bare model in a variable of its own. Call the wrapper itself for forward",
    ),
    Known(
        r"object has no attribute '(no_sync|module)'",
        "the model is not wrapped here, and `no_sync` and `module` are on the DDP object",
        "keep the bare model and the wrapped one in two variables; `contextlib.nullcontext()` where there is no DDP",
    ),
    Known(
        r"SyncBatchNorm layers only work with GPU modules",
        "SyncBatchNorm of torch needs CUDA tensors under DDP",
        "convert only where `device.type == 'cuda'`; GroupNorm needs no synchronisation at all",
    ),
    # ---- data
    Known(
        r"Invalid rank -?\d+, rank should be in the interval",
        "rank and num_replicas do not fit: their order is DistributedSampler(dataset, num_replicas, rank), ranks count from 0",
        "pass them by name, or leave both out: the process group tells them",
    ),
    Known(
        r"sampler option is mutually exclusive with shuffle|batch_sampler option is mutually exclusive",
        "a sampler decides the order itself",
        "leave shuffle (and, with a batch_sampler, batch_size and drop_last) out of the DataLoader; the shuffle belongs into the sampler",
    ),
    Known(
        r"DataLoader with IterableDataset: expected unspecified",
        "an IterableDataset decides its order itself: neither sampler nor shuffle can reach it",
        "share it out inside `__iter__`, by rank and by worker: `itertools.islice(it, rank * workers + worker, None, world_size * workers)`",
    ),
    Known(
        r"'(SequentialSampler|RandomSampler|NoneType|_InfiniteConstantSampler|BatchSampler)' object has no attribute 'set_epoch'",
        "the loader has no DistributedSampler: each rank would go through the whole data",
        "`DataLoader(data, sampler=DistributedSampler(data))`",
    ),
    Known(
        r"Expected more than 1 value per channel when training",
        "BatchNorm got a batch of one sample: the last, short batch of a shard",
        "drop_last=True in the training loader, or a batch size that leaves more than one",
    ),
    Known(
        r"received 0 items of ancdata|Too many open files",
        "the process has no file descriptors left: each tensor that workers or processes share takes one",
        'raise `ulimit -n`, or `torch.multiprocessing.set_sharing_strategy("file_system")`; do not keep the batches of a worker alive',
    ),
    # ---- devices
    Known(
        r"Found no NVIDIA driver|Torch not compiled with CUDA enabled|No CUDA GPUs are available",
        "the script asks for CUDA without looking whether there is any",
        '`device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")`, and device_ids only with CUDA',
    ),
    Known(
        r"invalid device ordinal",
        "this process does not see a GPU of that number: RANK was used for LOCAL_RANK, there are more ranks than GPUs, or each task sees one GPU only, as number 0",
        "`torch.cuda.set_device(local_rank)`, with local_rank below torch.cuda.device_count()",
    ),
    Known(
        r"Attempting to deserialize object on a CUDA device",
        "the checkpoint is loaded onto a GPU that is not here",
        '`torch.load(path, map_location="cpu", weights_only=True)`, then load_state_dict(): it copies onto the device of the model',
    ),
    Known(
        r"Expected all tensors to be on the same device",
        "not everything was moved: the batch, the target, a loss weight, or a tensor that a module keeps without registering it",
        "move the batch with `.to(device)`; register_buffer() for a module's constants; build the optimizer after model.to(device)",
    ),
    # ---- autograd
    Known(
        r"modified by an inplace operation",
        "a tensor that backward needs was written to after forward: a buffer that the next forward of DDP broadcasts, a parameter by an optimizer "
        "step between forward and backward, the hidden state of the step before, or an operation such as `+=`",
        "one forward over all inputs (or broadcast_buffers=False); step after all backward passes; detach() the state that goes from step to step; "
        "`x = x + y` for `x += y`",
    ),
    Known(
        r"backward through the graph a second time",
        "the graph of an earlier step is still part of this loss: a hidden state, a running loss or a cached output was kept with its graph",
        "detach() what goes from one step to the next; retain_graph=True only hides it and lets memory grow",
    ),
    Known(
        r"does not require grad and does not have a grad_fn",
        "the loss hangs on no parameter that is trained: computed under no_grad or inference_mode, from detached or re-made tensors (`.item()`, "
        "`torch.tensor(loss)`), or everything is frozen",
        "compute it from the output of the model outside no_grad; see that some parameters have requires_grad",
    ),
    Known(
        r"grad can be implicitly created only for scalar outputs",
        "backward() was called on more than one number: DataParallel gathers one loss for each device, reduction='none' one for each sample",
        "`loss.mean().backward()`",
    ),
    Known(
        r"a leaf Variable that requires grad is being used in an in-place operation|leaf variable has been moved into the graph interior",
        "a parameter was written to while autograd watched",
        "write to it under `torch.no_grad()`",
    ),
    Known(
        r"Inference tensors cannot be saved for backward|Inplace update to inference tensor outside InferenceMode",
        "a tensor made under inference_mode takes part in training",
        "use torch.no_grad() where it is made, or clone() it before",
    ),
    # ---- optimizer, scaler, schedule
    Known(
        r"optimizer got an empty parameter list",
        "the parameters were used up (a generator gives them once), filtered away, or are not the model's: submodules in a plain list or dict "
        "are not registered",
        "pass `model.parameters()` anew or a list; nn.ModuleList / nn.ModuleDict for submodules",
    ),
    Known(
        r"some parameters appear in more than one parameter group",
        "a shared or tied parameter was put into two groups",
        "collect each parameter once: `{id(p): p for p in ...}.values()`",
    ),
    Known(
        r"parameter group that doesn't match the size of optimizer's group|different number of parameter groups",
        "the optimizer's state was saved for other parameters: layers were added, frozen or put into other groups since",
        "build the same groups as at the save, then load; or load the model only and begin with a new optimizer",
    ),
    Known(
        r"unscale_\(\) has already been called|step\(\) has already been called since the last update",
        "the scaler's update() was not called since the last step of this optimizer",
        "once a step, in this order: scaler.unscale_(optimizer), clip, scaler.step(optimizer), scaler.update()",
    ),
    Known(
        r"No inf checks were recorded for this optimizer",
        "the optimizer has no gradient: backward() was not called on the scaled loss, or it holds other parameters than those of the model",
        "`scaler.scale(loss).backward()` before; build the optimizer from the model's parameters as they are now",
    ),
    Known(
        r"Tried to step \d+ times\. The specified number of total steps is",
        "the schedule was made for fewer steps than the loop takes: a world size, an accumulation or an epoch was counted on one side only",
        "total_steps = the number of calls of scheduler.step() on one rank: epochs * len(loader) // accumulation",
    ),
    # ---- checkpoints
    Known(
        r"Weights only load failed",
        "the file holds more than tensors and plain containers, and torch.load() no longer unpickles just anything",
        "save state_dict()s, numbers and strings only; for a class of your own that you trust torch.serialization.add_safe_globals([...])",
    ),
    Known(
        r"support the deepcopy protocol",
        "a module or object that is copied holds a tensor with a graph",
        "detach() what is kept between steps, or copy with load_state_dict() into a new model",
    ),
)

_COMPILED = [(re.compile(row.pattern), row) for row in KNOWN]


def meaning(error: str) -> Known | None:
    """The first row whose pattern is in "Type: message"."""
    return next((row for pattern, row in _COMPILED if pattern.search(error)), None)
