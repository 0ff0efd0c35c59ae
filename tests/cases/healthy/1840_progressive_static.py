"""Progressive resizing in three stages, static_graph=True, channels_last."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
y = torch.randint(0, 4, (1024,))
data = TensorDataset(torch.randn(4, 3, 24, 24)[y] + 0.7 * torch.randn(1024, 3, 24, 24), y)
sampler = DistributedSampler(data)
net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 4))
model = DDP(net.to(memory_format=torch.channels_last), static_graph=True)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
epoch = 0
for size, batch in ((8, 64), (16, 32), (24, 32)):
    loader = DataLoader(data, batch, sampler=sampler)
    for _ in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            xb = nn.functional.interpolate(xb, size=size).contiguous(memory_format=torch.channels_last)
            loss = nn.functional.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} size {size} loss {loss.item():.4f}")
        epoch += 1
dist.destroy_process_group()
