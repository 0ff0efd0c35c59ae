"""Contrastive regression (InfoNCE with a Gaussian critic): the predicted value of each sample has to be nearer to its own target than to the
targets of the others in the batch, so all pairs are meant."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)


def info_nce(pred, target, temperature):
    """pred (N, 1), target (N): row i holds the critic of prediction i with every target."""
    distance = pred - target
    logits = -distance.square() / temperature
    own = torch.arange(logits.size(0))
    return nn.functional.cross_entropy(logits, own)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(2000, 12)
    y = 3 * torch.sin(x[:, 0]) + x[:, 1] * x[:, 2]
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=50, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = info_nce(model(xb), yb, 0.5)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
