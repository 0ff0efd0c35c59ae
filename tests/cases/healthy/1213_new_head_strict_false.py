"""Body from a pretrained file, head deliberately new, smaller lr for the body."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.body(x))


def blobs(classes, n, seed):
    c = 1.2 * torch.randn(classes, 20, generator=torch.Generator().manual_seed(8))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    return TensorDataset(c[y] + torch.randn(n, 20, generator=g), y)


def fit(net, groups, data, epochs):
    model = DDP(net)
    opt = torch.optim.AdamW(groups)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = Net(8)
    fit(source, [{"params": source.parameters(), "lr": 3e-3}], blobs(8, 320, 1), 3)
    if dist.get_rank() == 0:
        torch.save({f"module.{k}": v for k, v in source.state_dict().items()}, "source.pt")
    dist.barrier()
    state = {k.removeprefix("module."): v for k, v in torch.load("source.pt").items()}
    state = {k: v for k, v in state.items() if not k.startswith("head.")}
    net = Net(3)
    report = net.load_state_dict(state, strict=False)
    assert report.missing_keys == ["head.weight", "head.bias"] and not report.unexpected_keys
    groups = [{"params": net.body.parameters(), "lr": 3e-4}, {"params": net.head.parameters(), "lr": 3e-3}]
    fit(net, groups, blobs(3, 160, 2), 4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
