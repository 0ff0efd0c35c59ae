"""Image-like classifier; a bf16 copy of the weights is exported to a temporary folder after epoch 0."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

EPOCHS, BATCH = 4, 16


class SmallConv(nn.Module):
    def __init__(self, n_classes=4):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3, padding=1)
        self.c2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16 * 4 * 4, n_classes)

    def forward(self, x):
        x = F.relu(self.c1(x))
        x = F.relu(self.c2(x))
        return self.fc(x.flatten(1))


def quadrant_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    x = 0.6 * torch.randn(n, 1, 8, 8, generator=g)
    for i in range(n):
        r, c = divmod(int(y[i]), 2)
        x[i, 0, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4] += 0.7
    return torch.utils.data.TensorDataset(x, y)


def export_bf16(ddp, folder):
    """called on all ranks, written by one"""
    ddp.bfloat16()
    state = {k: v.clone() for k, v in ddp.module.state_dict().items()}
    ddp.float()
    if dist.get_rank() == 0:
        torch.save(state, os.path.join(folder, "weights_bf16.pt"))
    dist.barrier()


def main():
    dist.init_process_group(backend="gloo", init_method="env://")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    ddp = DistributedDataParallel(SmallConv())
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    train, test = quadrant_images(320, 0), quadrant_images(80, 1)
    sampler = torch.utils.data.distributed.DistributedSampler(train)
    loader = torch.utils.data.DataLoader(train, batch_size=BATCH, sampler=sampler)
    with tempfile.TemporaryDirectory() as folder:  # a folder of its own on each rank, used by rank 0
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            ddp.train()
            for x, y in loader:
                sgd.zero_grad()
                F.cross_entropy(ddp(x), y).backward()
                sgd.step()
            if epoch == 0:
                export_bf16(ddp, folder)
            ddp.eval()
            xs, ys = (t[rank::world] for t in test.tensors)
            with torch.no_grad():
                hits = (ddp.module(xs).argmax(1) == ys).sum()
            dist.all_reduce(hits)
            if rank == 0:
                print(f"epoch {epoch} test accuracy {hits.item() / len(test):.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
