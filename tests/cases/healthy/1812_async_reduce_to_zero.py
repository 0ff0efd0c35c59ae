"""The loss for the log is reduced to rank 0 in the background; rank 0 alone waits, and reads, one step later."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)


class AsyncMeter:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.pending = None
        self.history = []

    def push(self, loss):
        self.drain()
        buf = loss.detach().clone()
        work = dist.reduce(buf, dst=0, op=dist.ReduceOp.SUM, async_op=True)
        if self.rank == 0:                 # the others only send: they never read buf again
            self.pending = (work, buf)

    def drain(self):
        if self.pending is not None:
            work, buf = self.pending
            work.wait()
            self.history.append((buf / self.world).item())
            self.pending = None


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(2048, 16)
    y = (x @ torch.randn(16, 1)).tanh() + 0.05 * torch.randn(2048, 1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    meter = AsyncMeter()
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            meter.push(loss)
        if dist.get_rank() == 0 and meter.history:
            print(f"epoch {epoch} loss {meter.history[-1]:.5f}")
    meter.drain()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
