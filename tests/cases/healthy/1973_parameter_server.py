"""Asynchronous parameter server with point-to-point messages: one server, two workers.

Workers never talk to each other and never wait for each other; each works on the weights it got last. Run with `python`.
"""
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

WORKERS = 2
SERVER = 0
STEPS_PER_WORKER = 120
BATCH = 32
LR = 0.05
MOMENTUM = 0.8
PUSH, PULL = 1, 2  # message tags


def dataset(part):
    """Noisy nonlinear regression; part 0 is for testing, workers own parts 1, 2, ..."""
    g = torch.Generator().manual_seed(40 + part)
    x = torch.randn(512, 10, generator=g)
    w = torch.randn(10, 2, generator=torch.Generator().manual_seed(4)) / 10 ** 0.5
    y = torch.sin(2 * (x @ w)).sum(1, keepdim=True)
    return x, y + 0.05 * torch.randn(512, 1, generator=g)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def flatten(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


@torch.no_grad()
def unflatten_into(flat, params):
    for p, piece in zip(params, flat.split([p.numel() for p in params])):
        p.copy_(piece.view_as(p))


def run_server():
    model = make_model()
    params = list(model.parameters())
    numel = sum(p.numel() for p in params)
    optimizer = torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)
    outgoing = {w: (torch.empty(numel), None) for w in range(1, WORKERS + 1)}  # buffer, unfinished send
    inbox = torch.empty(numel + 1)
    x_test, y_test = dataset(0)

    def send_weights(worker):
        buffer, previous = outgoing[worker]
        if previous is not None:
            previous.wait()  # the buffer may be reused only after its send is through
        buffer.copy_(flatten(params))
        outgoing[worker] = (buffer, dist.isend(buffer, dst=worker, tag=PULL))

    for worker in outgoing:
        send_weights(worker)
    loss_sum, start = 0.0, time.perf_counter()
    for update in range(1, WORKERS * STEPS_PER_WORKER + 1):
        worker = dist.recv(inbox, tag=PUSH)  # whoever is ready first
        loss_sum += inbox[-1].item()
        for p, piece in zip(params, inbox[:-1].split([p.numel() for p in params])):
            p.grad = piece.view_as(p).clone()
        # Each message is one worker's mini-batch and one update: nothing to average here.
        optimizer.step()
        send_weights(worker)
        if update % 60 == 0:
            with torch.no_grad():
                test = F.mse_loss(model(x_test), y_test).item()
            print(f"update {update:4d} train {loss_sum / 60:.4f} test {test:.4f} "
                  f"{update / (time.perf_counter() - start):.0f} updates/s", flush=True)
            loss_sum = 0.0
    for _, pending in outgoing.values():
        pending.wait()
    torch.save(model.state_dict(), "ps_model.pt")


def run_worker(rank):
    model = make_model()
    params = list(model.parameters())
    weights = torch.empty(sum(p.numel() for p in params))
    message = torch.empty(len(weights) + 1)
    x, y = dataset(rank)
    g = torch.Generator().manual_seed(rank)
    push = None
    for _ in range(STEPS_PER_WORKER):
        pull = dist.irecv(weights, src=SERVER, tag=PULL)
        idx = torch.randint(len(x), (BATCH,), generator=g)  # the batch is prepared while the weights travel
        xb, yb = x[idx], y[idx]
        pull.wait()
        unflatten_into(weights, params)
        loss = F.mse_loss(model(xb), yb)
        grads = torch.autograd.grad(loss, params)
        if push is not None:
            push.wait()
        torch.cat([flatten(grads), loss.detach().view(1)], out=message)
        push = dist.isend(message, dst=SERVER, tag=PUSH)
    push.wait()
    dist.recv(weights, src=SERVER, tag=PULL)  # the answer to the last push


def entry(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS + 1)
    if rank == SERVER:
        run_server()
    else:
        run_worker(rank)
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    mp.spawn(entry, args=(free_port(),), nprocs=WORKERS + 1)
