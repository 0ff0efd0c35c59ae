"""Decentralised SGD on a ring: no global reduction while training, each step averages with one neighbour."""
import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STEPS, BATCH, LR = 150, 32, 0.1
DIM, CLASSES = 16, 5


def partner_of(rank, world, step):
    """Even steps pair (0,1) (2,3) ..., odd steps pair (1,2) (3,0) ..."""
    forward = (rank + step) % 2 == 0
    return (rank + 1) % world if forward else (rank - 1) % world


def mix(model, partner):
    mine = parameters_to_vector(model.parameters()).detach()
    theirs = torch.empty_like(mine)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)])
    for work in works:
        work.wait()
    vector_to_parameters((mine + theirs) / 2, model.parameters())


def consensus(model, world):
    mine = parameters_to_vector(model.parameters()).detach()
    mean = mine.clone()
    dist.all_reduce(mean)
    mean /= world
    gap = (mine - mean).square().sum()
    dist.all_reduce(gap)
    return mean, (gap / world).sqrt().item()


def shard(rank):
    """A skewed shard: two classes are common on this node, the rest is rare."""
    centers = 1.5 * torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(2))
    gen = torch.Generator().manual_seed(30 + rank)
    weight = torch.ones(CLASSES)
    weight[rank % CLASSES] += 3
    weight[(rank + 1) % CLASSES] += 3
    y = torch.multinomial(weight, 1000, replacement=True, generator=gen)
    return centers[y] + torch.randn(1000, DIM, generator=gen), y, centers


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world % 2 == 0, "pairs need an even ring"

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y, centers = shard(rank)
    pick_from = torch.Generator().manual_seed(rank)

    running = 0.0
    for step in range(STEPS):
        pick = torch.randint(len(x), (BATCH,), generator=pick_from)
        loss = F.cross_entropy(model(x[pick]), y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mix(model, partner_of(rank, world, step))
        running += loss.item()
        if (step + 1) % 30 == 0:
            _, gap = consensus(model, world)  # for the log only, nothing is written back
            stats = torch.tensor([running / 30])
            dist.all_reduce(stats)
            running = 0.0
            if rank == 0:
                print(f"step {step + 1}: loss {stats.item() / world:.4f} distance to mean {gap:.4f}", flush=True)
        if step == STEPS // 2:
            for group in optimizer.param_groups:
                group["lr"] = LR / 4

    mean, _ = consensus(model, world)
    vector_to_parameters(mean, model.parameters())
    model.eval()
    if rank == 0:
        gen = torch.Generator().manual_seed(999)
        y_test = torch.randint(CLASSES, (1000,), generator=gen)
        x_test = centers[y_test] + torch.randn(1000, DIM, generator=gen)
        with torch.no_grad():
            acc = (model(x_test).argmax(-1) == y_test).float().mean().item()
        print(f"consensus model: accuracy {acc:.3f}", flush=True)
        torch.save(model.state_dict(), "consensus.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
