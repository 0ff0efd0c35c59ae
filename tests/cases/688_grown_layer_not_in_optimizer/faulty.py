"""Progressive growing: the network gets a wider hidden part in mid-run and is wrapped again."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Growing(nn.Module):
    def __init__(self, inp=10, width=8, out=1):
        super().__init__()
        self.inp, self.out_dim = inp, out
        self.hidden, self.readout = nn.Linear(inp, width), nn.Linear(width, out)

    @torch.no_grad()
    def grow(self, extra):
        """Net2Wider: old units are kept, new ones start small."""
        old_h, old_r = self.hidden, self.readout
        width = old_h.out_features + extra
        hidden, readout = nn.Linear(self.inp, width), nn.Linear(width, self.out_dim)
        hidden.weight[: old_h.out_features], hidden.bias[: old_h.out_features] = old_h.weight, old_h.bias
        readout.weight.mul_(0.1)
        readout.weight[:, : old_h.out_features], readout.bias[:] = old_r.weight, old_r.bias
        self.hidden, self.readout = hidden, readout

    def forward(self, x):
        return self.readout(torch.tanh(self.hidden(x)))


class GrowthTrainer:
    def __init__(self, net, lr, grow_at):
        self.net, self.lr, self.grow_at = net, lr, grow_at
        self.rank = dist.get_rank()
        self.rewrap()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def rewrap(self):
        self.model = DDP(self.net)

    def maybe_grow(self, epoch):
        if epoch in self.grow_at:
            self.net.grow(self.grow_at[epoch])
            self.rewrap()
            if self.rank == 0:
                print(f"grown to {self.net.hidden.out_features} units")

    def fit(self, data, epochs):
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=20, sampler=sampler)
        for epoch in range(epochs):
            self.maybe_grow(epoch)
            sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for x, y in loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.model.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += torch.tensor([loss.item(), 1.0])
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")


def ridge(n):
    g = torch.Generator().manual_seed(52)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, torch.sin(1.5 * x[:, :3]).sum(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(44)
    GrowthTrainer(Growing(), lr=1e-2, grow_at={2: 8, 4: 16}).fit(ridge(480), 6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
