"""Two stages in one job: masked-patch pretraining of an encoder, then a classifier that starts from it."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PATCHES, WIDTH = 16, 12


def signals(count, seed):
    """Sums of two waves; the class says which pair of frequencies."""
    gen = torch.Generator().manual_seed(seed)
    kind = torch.randint(4, (count,), generator=gen)
    t = torch.linspace(0, 6.283, PATCHES * WIDTH)
    phase = torch.rand(count, 2, 1, generator=gen) * 6.283
    low, high = (1 + kind % 2)[:, None] * 2.0, (5 + 3 * (kind // 2))[:, None] * 1.0
    wave = torch.sin(low * t + phase[:, 0]) + torch.sin(high * t + phase[:, 1])
    wave += 0.4 * torch.randn(wave.shape, generator=gen)
    return wave.view(count, PATCHES, WIDTH), kind


class Encoder(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.inlet = nn.Linear(WIDTH, dim)
        self.place = nn.Parameter(torch.randn(PATCHES, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, patches):
        return self.layers(self.inlet(patches) + self.place)


class Reconstructor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decode = nn.Linear(48, WIDTH)

    def forward(self, patches, hidden):
        seen = patches.masked_fill(hidden[..., None], 0.0)
        error = (self.decode(self.encoder(seen)) - patches) ** 2
        return error[hidden].mean()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(48, 4)

    def forward(self, patches):
        return self.head(self.encoder(patches).mean(1))


def initialise_from(model, path):
    """Takes over whatever fits by name and shape; new layers (the head) keep their own start."""
    stored = torch.load(path, map_location="cpu", weights_only=True)
    current = model.state_dict()
    fitting = {k: v for k, v in stored.items() if k in current and v.shape == current[k].shape}
    current.update(fitting)
    model.load_state_dict(current)
    return model


def batches(tensors, size, epochs, rank, world):
    for epoch in range(epochs):
        order = torch.randperm(len(tensors[0]), generator=torch.Generator().manual_seed(epoch))[rank::world]
        for part in order.split(size):
            if len(part) == size:
                yield [t[part] for t in tensors]


def run_stage(model, loss_fn, stream, lr, label, rank):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for batch in stream:
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ends = torch.tensor([sum(losses[:5]) / 5, sum(losses[-5:]) / 5])
    dist.all_reduce(ends)
    ends /= dist.get_world_size()
    if rank == 0:
        print(f"{label}: {len(losses)} steps, loss {ends[0]:.4f} -> {ends[1]:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, default=Path("stage1/encoder.pt"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)

    waves, kinds = signals(1600, 1)
    masker = torch.Generator().manual_seed(50 + rank)
    pretrain = DDP(Reconstructor())

    def masked(model, batch):
        hidden = torch.rand(len(batch[0]), PATCHES, generator=masker) < 0.4
        return model(batch[0], hidden)

    run_stage(pretrain, masked, batches([waves], 40, 3, rank, world), 2e-3, "pretraining", rank)
    if rank == 0:
        args.weights.parent.mkdir(parents=True, exist_ok=True)
        torch.save(pretrain.state_dict(), args.weights)
    dist.barrier()

    few_waves, few_kinds = signals(320, 2)
    classifier = DDP(initialise_from(Classifier(), args.weights))
    run_stage(classifier, lambda m, b: F.cross_entropy(m(b[0]), b[1]),
              batches([few_waves, few_kinds], 20, 4, rank, world), 1e-3, "fine-tuning", rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
