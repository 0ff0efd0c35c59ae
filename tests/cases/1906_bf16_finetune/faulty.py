"""Fine-tune a small patch transformer in bfloat16."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class PatchTransformer(nn.Module):
    def __init__(self, dim=48, patches=16, classes=5):
        super().__init__()
        self.embed = nn.Linear(16, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, patches, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        h = self.blocks(self.embed(x) + self.pos)
        return self.head(self.norm(h).mean(1))


def patches(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(5, 16, 16, generator=torch.Generator().manual_seed(9))
    y = torch.randint(0, 5, (n,), generator=g)
    return TensorDataset(0.7 * proto[y] + torch.randn(n, 16, 16, generator=g), y)


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--seed", type=int, default=2)
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    net = PatchTransformer().to(torch.bfloat16)
    model = DDP(net)
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=args.lr
    )
    train_set, val_set = patches(640, 1), patches(160, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        began = time.perf_counter()
        total = torch.zeros(2)
        for x, y in loader:
            logits = model(x.to(torch.bfloat16))
            loss = nn.functional.cross_entropy(logits.float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(y), len(y)])

        model.eval()
        hits = torch.zeros(2)
        with torch.no_grad():
            for i in range(rank, len(val_set), dist.get_world_size()):
                x, y = val_set[i]
                logits = net(x.unsqueeze(0).to(torch.bfloat16))
                hits += torch.tensor([float(logits.argmax(1).item() == y.item()), 1.0])
        both = torch.cat([total, hits])
        dist.all_reduce(both)
        if rank == 0:
            took = time.perf_counter() - began
            print(f"epoch {epoch} loss {both[0] / both[1]:.4f} val {both[2] / both[3]:.3f} ({took:.1f} s)", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "patch_transformer.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
