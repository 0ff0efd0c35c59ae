"""Transfer: the backbone comes from a checkpoint with another head; head keys are dropped before loading, the position table is interpolated."""
import io
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class ViT(nn.Module):
    def __init__(self, patches, classes, d=32):
        super().__init__()
        self.patch = nn.Linear(12, d)
        self.pos = nn.Parameter(0.02 * torch.randn(1, patches, d))
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 4, 64, 0.0, batch_first=True, norm_first=True), 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        return self.head(self.enc(self.patch(x) + self.pos).mean(1))


def adapt(sd, model):
    own = model.state_dict()
    sd = {k: v for k, v in sd.items() if not k.startswith("head.")}
    if sd["pos"].shape != own["pos"].shape:
        sd["pos"] = F.interpolate(sd["pos"].transpose(1, 2), size=own["pos"].shape[1], mode="linear", align_corners=False).transpose(1, 2)
    return sd


def set_(n, patches, classes, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(classes, patches, 12, generator=torch.Generator().manual_seed(classes))
    y = torch.randint(classes, (n,), generator=g)
    return TensorDataset(proto[y] + 1.5 * torch.randn(n, patches, 12, generator=g), y)


def train(net, ds, epochs, groups):
    smp = DistributedSampler(ds)
    dl = DataLoader(ds, 16, sampler=smp, drop_last=True)
    opt = torch.optim.AdamW(groups)
    for e in range(epochs):
        smp.set_epoch(e)
        net.train()
        run = torch.zeros(2)
        for x, y in dl:
            l = F.cross_entropy(net(x), y)
            opt.zero_grad(set_to_none=True)
            l.backward()
            opt.step()
            run += torch.tensor([l.item(), 1])
        dist.all_reduce(run)
        if dist.get_rank() == 0:
            print(f"  epoch {e} loss {run[0] / run[1]:.3f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    src = DDP(ViT(6, 8))
    train(src, set_(256, 6, 8, 1), 2, src.parameters())
    buf = io.BytesIO()
    torch.save(src.module.state_dict(), buf)
    buf.seek(0)

    target = ViT(9, 3)
    res = target.load_state_dict(adapt(torch.load(buf, weights_only=True), target), strict=False)
    assert sorted(res.missing_keys) == ["head.bias", "head.weight"] and not res.unexpected_keys
    net = DDP(target)                                    # DDP broadcasts the new head
    head = [p for n, p in net.module.named_parameters() if n.startswith("head")]
    body = [p for n, p in net.module.named_parameters() if not n.startswith("head")]
    train(net, set_(192, 9, 3, 2), 3, [{"params": body, "lr": 3e-4}, {"params": head, "lr": 3e-3}])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
