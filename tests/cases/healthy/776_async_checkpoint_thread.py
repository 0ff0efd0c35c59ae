"""Rank 0 snapshots to CPU clones and lets a thread write them while training goes on; the thread is joined before the next snapshot."""
import copy, os, shutil, tempfile, threading
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def clone_tree(o):
    if torch.is_tensor(o):
        return o.detach().to("cpu", copy=True)
    if isinstance(o, dict):
        return {k: clone_tree(v) for k, v in o.items()}
    if isinstance(o, (list, tuple)):
        return type(o)(clone_tree(v) for v in o)
    return copy.copy(o)


class AsyncSaver:
    def __init__(self, folder):
        self.folder, self.thread = folder, None

    def save(self, step, **objects):
        self.wait()
        snap = {k: clone_tree(v.state_dict()) for k, v in objects.items()}
        snap["step"] = step

        def write():
            final = os.path.join(self.folder, f"step{step}.pt")
            torch.save(snap, final + ".part")
            os.replace(final + ".part", final)

        self.thread = threading.Thread(target=write, name="saver")
        self.thread.start()

    def wait(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = None


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    net = DDP(nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 24)))
    opt = torch.optim.AdamW(net.parameters(), 2e-3)
    folder = tempfile.mkdtemp(prefix="async776_") if rank == 0 else None
    saver = AsyncSaver(folder) if rank == 0 else None
    g = torch.Generator().manual_seed(40 + rank)
    A = torch.randn(24, 24, generator=torch.Generator().manual_seed(0)) / 5
    for step in range(1, 91):
        x = torch.randn(64, 24, generator=g)
        loss = F.mse_loss(net(x), x @ A)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 30 == 0:
            if saver:
                saver.save(step, model=net.module, optimizer=opt)
            l = loss.detach().clone()
            dist.all_reduce(l)
            if rank == 0:
                print(f"step {step} mse {l.item() / world:.4f}")
    if saver:
        saver.wait()
        last = torch.load(os.path.join(folder, "step90.pt"))
        for a, b in zip(last["model"].values(), net.module.state_dict().values()):
            assert torch.equal(a, b)
        shutil.rmtree(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
