"""Saliency net: pre-train a backbone, then fine-tune with a new decoder."""
import argparse
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Backbone(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.block = nn.TransformerEncoderLayer(dim, 4, 48, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, img):
        return self.norm(self.block(self.patch(img).flatten(2).transpose(1, 2)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(24, 4)

    def forward(self, img):
        return self.head(self.backbone(img).mean(1))


class Saliency(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.decoder = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 1))

    def forward(self, img):
        return self.decoder(self.backbone(img)).squeeze(-1)


def scenes(n=192):
    g = torch.Generator().manual_seed(10)
    cell = torch.randint(0, 16, (n,), generator=g)
    img = 0.2 * torch.randn(n, 3, 16, 16, generator=g)
    for i, c in enumerate(cell.tolist()):
        r, k = divmod(c, 4)
        img[i, :, 4 * r:4 * r + 4, 4 * k:4 * k + 4] += 1
    return TensorDataset(img, cell)


def run(model, epochs, lr, target, rank, tag):
    data = scenes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        tot = torch.zeros(2)
        for img, cell in loader:
            loss = nn.functional.cross_entropy(model(img), target(cell))
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(tot)
        if rank == 0:
            print(f"{tag} epoch {epoch} loss {(tot[0] / tot[1]).item():.4f}", flush=True)


def load_pretrained(net, path):
    saved = torch.load(path, map_location="cpu")
    new_state = OrderedDict()
    for k, v in saved.items():
        name = k[7:] if k.startswith("module.") else k  # remove `module.`
        new_state[name] = v
    net.load_state_dict(new_state, strict=False)  # the classifier's head is not needed
    return net


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pretrained", default="cls_pretrain.pth")
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    classifier = DDP(Classifier())
    run(classifier, 2, args.lr, lambda c: c % 4, rank, "pretrain")
    if rank == 0:
        torch.save(classifier.module.state_dict(), args.pretrained)
    dist.barrier()
    model = DDP(load_pretrained(Saliency(), args.pretrained))
    run(model, 2, args.lr, lambda c: c, rank, "finetune")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
