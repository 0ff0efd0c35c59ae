"""Sound-event classifier with an evaluator object that gathers predictions of all ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def clips(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.arange(32) / 32
    x = torch.sin(6.2832 * (1 + 2 * y)[:, None] * t + torch.rand(n, 1, generator=g)) + 0.6 * torch.randn(n, 32, generator=g)
    return TensorDataset(x.unsqueeze(1), y)


class Evaluator:
    def __init__(self, loader):
        self.loader = loader
        self.reset()

    def reset(self):
        self.preds, self.labels = [], []

    @torch.no_grad()
    def __call__(self, model):
        model.eval()
        self.reset()
        for x, y in self.loader:
            self.preds.append(model(x).argmax(1))
            self.labels.append(y)
        hits = (torch.cat(self.preds) == torch.cat(self.labels)).sum()
        stats = torch.stack([hits, torch.tensor(sum(len(l) for l in self.labels))])
        dist.all_reduce(stats)
        model.train()
        return stats[0].item() / stats[1].item(), stats[1].item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(
        nn.Sequential(nn.Conv1d(1, 16, 7, stride=2), nn.ReLU(), nn.Conv1d(16, 16, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    train_set = clips(256, 1)
    val_set = clips(64, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    evaluator = Evaluator(DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False)))
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc, n = evaluator(model)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: val accuracy {acc:.3f} on {n} clips", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
