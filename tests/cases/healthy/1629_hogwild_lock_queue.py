"""Hogwild: the parent puts shard numbers into a queue, three children train one shared model.

Plain SGD without state; a lock guards the update, gradients belong to each child alone. Results come
back by a second queue. The parent never trains, it only evaluates.
"""
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

SHARDS, PER_SHARD, EPOCHS = 12, 120, 6


def shard(k):
    g = torch.Generator().manual_seed(400 + k)
    x = torch.rand(PER_SHARD, 2, generator=g) * 4 - 2
    y = ((x[:, 0] * 2).sin() + x[:, 1] > 0).long()
    return x, y


def build():
    return nn.Sequential(nn.Linear(2, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2))


def child(number, model, tasks, results, lock, updates):
    torch.set_num_threads(1)
    local = build()  # a private copy to compute gradients on a consistent snapshot
    opt = torch.optim.SGD(model.parameters(), lr=0.15)
    g = torch.Generator().manual_seed(number)
    while True:
        job = tasks.get()
        if job is None:
            break
        epoch, k = job
        x, y = shard(k)
        total = 0.0
        for idx in torch.randperm(len(x), generator=g).split(20):
            with lock:
                local.load_state_dict(model.state_dict())
            local.zero_grad()
            loss = F.cross_entropy(local(x[idx]), y[idx])
            loss.backward()
            with lock:
                for shared, own in zip(model.parameters(), local.parameters()):
                    shared.grad = own.grad
                opt.step()
                updates.value += 1
            total += loss.item() * len(idx)
        results.put((epoch, k, total / len(x)))


def main():
    torch.manual_seed(0)
    ctx = mp.get_context("spawn")
    model = build()
    model.share_memory()
    tasks, results, lock, updates = ctx.Queue(), ctx.Queue(), ctx.Lock(), ctx.Value("i", 0, lock=False)
    kids = [ctx.Process(target=child, args=(i, model, tasks, results, lock, updates)) for i in range(3)]
    for kid in kids:
        kid.start()
    order = torch.Generator().manual_seed(1)
    for epoch in range(EPOCHS):
        for k in torch.randperm(SHARDS, generator=order).tolist():
            tasks.put((epoch, k))
        losses = [results.get()[2] for _ in range(SHARDS)]  # an epoch ends before the next begins
        print(f"epoch {epoch} mean loss {sum(losses) / SHARDS:.4f}", flush=True)
    for _ in kids:
        tasks.put(None)
    for kid in kids:
        kid.join()
        assert kid.exitcode == 0
    assert updates.value == EPOCHS * SHARDS * PER_SHARD // 20
    model.eval()
    good = seen = 0
    with torch.no_grad():
        for k in range(SHARDS, SHARDS + 3):
            x, y = shard(k)
            good += (model(x).argmax(1) == y).sum().item()
            seen += len(y)
    print(f"{updates.value} updates, held-out accuracy {good / seen:.3f}")
    torch.save({k: v.clone() for k, v in model.state_dict().items()}, "hogwild.pt")
    assert good / seen > 0.85


if __name__ == "__main__":
    main()
