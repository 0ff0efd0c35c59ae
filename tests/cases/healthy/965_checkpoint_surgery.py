"""Take a pretrained ViT-like checkpoint (compiled + DDP keys, other head, smaller grid), operate on it, fine-tune with a compiled model."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MiniViT(nn.Module):
    def __init__(self, grid, classes, width=32):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, grid * grid, width))
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos_embed
        x = x + self.attn(x, x, x, need_weights=False)[0]
        x = x + self.mlp(self.norm(x))
        return self.head(x.mean(1))


def pretrained_checkpoint(path):
    """Stands for a file that another project left: keys with both prefixes, half precision, ten classes, a 4 x 4 grid."""
    torch.manual_seed(0)
    old = MiniViT(4, 10)
    torch.save({"epoch": 299, "model": {"module._orig_mod." + k: v.half() for k, v in old.state_dict().items()}}, path)


def operate(state, model):
    clean = {}
    for key, value in state.items():
        for prefix in ("module.", "_orig_mod."):
            key = key.removeprefix(prefix)
        clean[key] = value.float()
    own = model.state_dict()
    pos = clean["pos_embed"]
    if pos.shape != own["pos_embed"].shape:
        side, new = int(pos.shape[1] ** 0.5), int(own["pos_embed"].shape[1] ** 0.5)
        grid = pos.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        clean["pos_embed"] = F.interpolate(grid, size=new, mode="bicubic", align_corners=False).permute(0, 2, 3, 1).flatten(1, 2)
    dropped = [k for k in clean if k.startswith("head.")]
    for k in dropped:
        del clean[k]
    result = model.load_state_dict(clean, strict=False)
    assert result.missing_keys == ["head.weight", "head.bias"] and not result.unexpected_keys, result
    return dropped


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # each rank makes its own copy, as each node would download its own
    folder = tempfile.mkdtemp(prefix=f"pre{rank}_")
    path = os.path.join(folder, "vit.pt")
    pretrained_checkpoint(path)
    torch.manual_seed(50)
    model = MiniViT(6, 3)
    dropped = operate(torch.load(path, map_location="cpu")["model"], model)
    if rank == 0:
        print("dropped from the checkpoint:", ", ".join(dropped))

    head, body, bare = [], [], []
    for name, p in model.named_parameters():
        (head if name.startswith("head") else bare if p.ndim == 1 or name == "pos_embed" else body).append(p)
    ddp = DDP(model)
    compiled = torch.compile(ddp, backend="eager")
    opt = torch.optim.AdamW([{"params": body, "lr": 3e-4}, {"params": bare, "lr": 3e-4, "weight_decay": 0.0}, {"params": head, "lr": 5e-3}], weight_decay=0.05)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, [lambda s: min(1, (s + 1) / 10)] * 3)

    g = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (240,), generator=g)
    x = 0.5 * torch.randn(240, 1, 12, 12, generator=g)
    for i, c in enumerate(y.tolist()):
        x[i, 0, 4 * c : 4 * c + 4] += 1
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for xb, yb in loader:
            out = compiled(xb)
            loss = F.cross_entropy(out, yb, label_smoothing=0.1)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            seen += torch.tensor([(out.argmax(1) == yb).sum(), len(yb)])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {(seen[0] / seen[1]).item():.3f}")
    if rank == 0:
        torch.save({k.removeprefix("module."): v for k, v in ddp.state_dict().items()}, os.path.join(folder, "finetuned.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
