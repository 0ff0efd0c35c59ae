"""Monocular depth toy: a trainer in the style of a small lightning clone, one output dict per step."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Scenes(Dataset):
    def __init__(self, n, size=24):
        self.n = n
        self.size = size

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 + i)
        slope = torch.rand(2, generator=g)
        grid = torch.linspace(0, 1, self.size)
        depth = 1 + slope[0] * grid.view(-1, 1) + slope[1] * grid.view(1, -1)
        image = torch.stack([1 / depth, depth.log(), slope.mean().expand_as(depth)])
        return image + 0.02 * torch.randn(image.shape, generator=g), depth.unsqueeze(0)


class DepthNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ELU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ELU(),
            nn.Conv2d(width, 1, 3, padding=1), nn.Softplus())

    def forward(self, image):
        return self.net(image)


class DepthModule:
    def __init__(self, lr):
        self.model = DDP(DepthNet())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def training_step(self, batch):
        image, depth = batch
        pred = self.model(image)
        loss = (pred.clamp(min=1e-3).log() - depth.log()).abs().mean()
        abs_rel = ((pred - depth).abs() / depth).mean()
        return {"loss": loss, "abs_rel": abs_rel}

    def training_epoch_end(self, outputs):
        keys = outputs[0].keys()
        local = torch.stack([torch.stack([o[k] for o in outputs]).mean() for k in keys]).detach()
        dist.all_reduce(local)
        return dict(zip(keys, (local / dist.get_world_size()).tolist()))


class Trainer:
    def __init__(self, max_epochs, seed):
        self.max_epochs = max_epochs
        self.seed = seed
        self.rank = dist.get_rank()

    def fit(self, module, dataset):
        sampler = DistributedSampler(dataset, shuffle=True, seed=self.seed, drop_last=True)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
        for epoch in range(self.max_epochs):
            sampler.set_epoch(epoch)
            module.model.train()
            outputs = []
            for batch in loader:
                module.optimizer.zero_grad()
                output = module.training_step(batch)
                output["loss"].backward()
                module.optimizer.step()
                outputs.append({k: v.detach() for k, v in output.items()})
            metrics = module.training_epoch_end(outputs)
            if self.rank == 0:
                print(f"epoch {epoch} " + " ".join(f"{k} {v:.4f}" for k, v in metrics.items()), flush=True)

    def save(self, module, path):
        if self.rank == 0:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save(module.model.module.state_dict(), path)
        dist.barrier()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    module = DepthModule(lr=2e-3)
    trainer = Trainer(max_epochs=2, seed=31)
    trainer.fit(module, Scenes(1600))
    trainer.save(module, "runs/depth/last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
