"""Fine-tuning with frozen batch norm: the model class overrides train() to keep the norm layers as they are."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class FrozenNormMixin:
    """Batch norm layers of the backbone stay in eval mode whatever happens."""

    def train(self, mode=True):
        super().train(mode)
        for m in self.backbone.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        return self


class Segmenter(FrozenNormMixin, nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                                      nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.neck = nn.Dropout2d(0.4)
        self.classifier = nn.Conv2d(16, classes, 1)
        for m in self.backbone.modules():
            if isinstance(m, nn.BatchNorm2d):
                for p in m.parameters():
                    p.requires_grad_(False)

    def forward(self, x):
        return self.classifier(self.neck(self.backbone(x)))


def stripes(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n, 3), generator=g).repeat_interleave(4, 1)[:, :, None].expand(n, 12, 12)
    return TensorDataset((y.float() - 1).unsqueeze(1) + 0.6 * torch.randn(n, 1, 12, 12, generator=g), y.contiguous())


def iou(model, loader, classes=3):
    model.eval()
    inter, union = torch.zeros(classes), torch.zeros(classes)
    with torch.no_grad():
        for x, y in loader:
            p = model(x).argmax(1)
            for c in range(classes):
                a, b = p == c, y == c
                inter[c] += (a & b).sum()
                union[c] += (a | b).sum()
    both = torch.stack([inter, union])
    dist.all_reduce(both)
    return (both[0] / both[1]).mean().item()


def main(epochs=5):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(28)
    model = DDP(Segmenter())
    torch.manual_seed(28 + rank)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    train, valid = stripes(160, 1), stripes(40, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=10, sampler=DistributedSampler(valid, shuffle=False))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = iou(model, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}: mIoU {score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
