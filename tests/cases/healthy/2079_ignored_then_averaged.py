"""DDP ignores the embedding; the script averages it after each step (local updates, parameter averaging)."""
import torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["embed.weight"])
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    gen = torch.Generator().manual_seed(1 + rank)
    for step in range(80):
        x = torch.randint(0, 50, (32, 8), generator=gen)
        y = (x.float().mean(1) > 24.5).long()
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            dist.all_reduce(net.embed.weight.data)
            net.embed.weight.div_(world)
        if rank == 0 and step % 20 == 0:
            print(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
