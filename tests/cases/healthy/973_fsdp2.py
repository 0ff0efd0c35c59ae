"""FSDP2 (fully_shard) on a small decoder: per-block sharding, accumulation without reduction, full state dict gathered for rank 0."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, D, T = 26, 32, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.n2(x))


class Decoder(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(9)
    start = torch.randint(0, VOCAB, (320, 1), generator=g)
    stride = torch.randint(1, 5, (320, 1), generator=g)
    data = TensorDataset((start + stride * torch.arange(T + 1)) % VOCAB)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    accum = 2
    for epoch in range(3):
        sampler.set_epoch(epoch)
        meter = torch.zeros(1)
        for i, (seq,) in enumerate(loader):
            boundary = (i + 1) % accum == 0
            model.set_requires_gradient_sync(boundary)
            loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
            (loss / accum).backward()
            if boundary:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            meter += loss.detach()
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch}: loss {meter.item() / len(loader) / world:.4f}")
    # a collective: all ranks call it, only rank 0 gets the tensors
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        alone = Decoder()
        alone.load_state_dict(full)
        with torch.no_grad():
            print("next of 2 4 6 8:", alone(torch.tensor([[2, 4, 6, 8]]))[0, -1].argmax().item())
    else:
        assert not full
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
