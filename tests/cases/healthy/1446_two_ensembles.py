"""Four processes, two groups: each pair trains its own ensemble member with DDP, scoring is joint."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PER_MEMBER = 2


def make(n, seed):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, ((x[:, :4] * x[:, 4:]).sum(1) > 0).long())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    members = world // PER_MEMBER
    member, local = divmod(rank, PER_MEMBER)
    train_groups = [dist.new_group(list(range(m * PER_MEMBER, (m + 1) * PER_MEMBER))) for m in range(members)]
    leaders = dist.new_group([m * PER_MEMBER for m in range(members)])
    group = train_groups[member]

    torch.manual_seed(member)
    width = 32 if member == 0 else 48
    net = DDP(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)), process_group=group)
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    train, test = make(480, 1), make(200, 2)
    sampler = DistributedSampler(train, num_replicas=PER_MEMBER, rank=local, seed=member)
    loader = DataLoader(train, batch_size=24, sampler=sampler)
    for epoch in range(5 + member):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total, group=group)
        if local == 0:
            print(f"member {member} epoch {epoch}: {total.item() / (PER_MEMBER * len(loader)):.4f}", flush=True)
    if local == 0:
        with torch.no_grad():
            prob = net.module(test.tensors[0]).softmax(1)
        dist.all_reduce(prob, group=leaders)
        if rank == 0:
            print(f"ensemble accuracy {(prob.argmax(1) == test.tensors[1]).float().mean().item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
