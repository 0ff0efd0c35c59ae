"""LoRA on a frozen transformer: adapters saved alone, loaded with strict=False, merged into the base at the end."""
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base, self.scale = base, alpha / r
        self.lora_a = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, r))
        self.merged = False

    def forward(self, x):
        out = self.base(x)
        return out if self.merged else out + self.scale * (x @ self.lora_a.T) @ self.lora_b.T

    @torch.no_grad()
    def merge(self):
        self.base.weight += self.scale * self.lora_b @ self.lora_a
        self.merged = True


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, v = self.query(x), self.value(x)
        x = x + torch.softmax(q @ q.transpose(1, 2) / math.sqrt(q.shape[-1]), -1) @ v
        return self.head((x + self.ff(x)).mean(1))


def pretrained():
    torch.manual_seed(1234)  # stands for the downloaded weights
    return Encoder()


def inject(model):
    model.requires_grad_(False)
    model.query, model.value = LoRALinear(model.query), LoRALinear(model.value)
    for p in model.head.parameters():
        p.requires_grad_(True)
    return model


def adapter_state(model):
    return {k: v for k, v in model.state_dict().items() if "lora_" in k or k.startswith("head.")}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = inject(pretrained())
    ddp = DDP(model)
    g = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 30, (360, 10), generator=g)
    labels = (tokens < 10).sum(1).sub(2).clamp(0, 2)
    data = TensorDataset(tokens, labels)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    trainable = [p for p in ddp.parameters() if p.requires_grad]
    if rank == 0:
        total = sum(p.numel() for p in ddp.parameters())
        print(f"training {sum(p.numel() for p in trainable)} of {total} numbers")
    opt = torch.optim.AdamW(trainable, lr=1e-2)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            loss = F.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        mean = torch.tensor(losses).mean()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}")

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "adapter.pt")
    if rank == 0:
        torch.save(adapter_state(model), path)
    dist.barrier()

    served = inject(pretrained())
    result = served.load_state_dict(torch.load(path), strict=False)
    assert not result.unexpected_keys and all("lora_" not in k for k in result.missing_keys)
    served.eval()
    with torch.no_grad():
        before = served(tokens[:50])
        served.query.merge()
        served.value.merge()
        after = served(tokens[:50])
    if rank == 0:
        print(f"merged: outputs differ by at most {(before - after).abs().max().item():.1e}")
    dist.barrier()
    if rank == 0:
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
