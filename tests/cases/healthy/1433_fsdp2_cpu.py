"""A small encoder trained with fully_shard on a CPU mesh."""
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d=32, depth=3, classes=4):
        super().__init__()
        self.embed = nn.Linear(10, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.out = nn.Linear(d, classes)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    g = torch.Generator().manual_seed(3)
    x = torch.randn(512, 10, generator=g)
    y = (x @ torch.randn(10, 4, generator=g)).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            opt.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        norm = norm.full_tensor().item()
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / (world * len(loader)):.4f} grad norm {norm:.2f}")
    full = dcs.get_model_state_dict(model, options=dcs.StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(full, "full.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
