"""Tensor-parallel MLP with DTensor; every process reads the same batches."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


class FeedForward(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.a, self.b, self.out = nn.Linear(8, 24), FeedForward(24, 64), FeedForward(24, 64), nn.Linear(24, 1)

    def forward(self, x):
        return self.out(self.b(self.a(torch.relu(self.inp(x)))))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(21)
    model = Net()
    for block in (model.a, model.b):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    x = torch.randn(320, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].pow(2).sum(1, keepdim=True).sqrt())
    loader = DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(17))
    for epoch in range(6):
        total = 0.0
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
