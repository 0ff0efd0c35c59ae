# nproc: 1 - Implementing batch RPC processing (tutorial): a parameter server that updates when all trainers have reported, trainers over RPC
import os
import socket
import threading
from datetime import datetime

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim

num_classes, batch_update_size, num_batches = 4, 2, 25


def timed_log(text):
    print(f"{datetime.now().strftime('%H:%M:%S')} {text}", flush=True)


class BatchUpdateParameterServer:
    def __init__(self, batch_update_size=batch_update_size):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, num_classes))
        self.lock = threading.Lock()
        self.future_model = torch.futures.Future()
        self.batch_update_size = batch_update_size
        self.curr_update_size = 0
        self.updates = 0
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(ps_rref, grads):
        self = ps_rref.local_value()
        with self.lock:
            self.curr_update_size += 1
            for p, g in zip(self.model.parameters(), grads):
                p.grad += g
            fut = self.future_model
            if self.curr_update_size >= self.batch_update_size:
                for p in self.model.parameters():
                    p.grad /= self.batch_update_size
                self.curr_update_size = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.updates += 1
                fut.set_result(self.model)
                self.future_model = torch.futures.Future()
        return fut


class Trainer:
    def __init__(self, ps_rref):
        self.ps_rref, self.loss_fn = ps_rref, nn.CrossEntropyLoss()
        self.name = rpc.get_worker_info().name
        self.g = torch.Generator().manual_seed(rpc.get_worker_info().id)
        self.proto = torch.randn(num_classes, 12, generator=torch.Generator().manual_seed(5))

    def get_next_batch(self):
        for _ in range(num_batches):
            y = torch.randint(0, num_classes, (20,), generator=self.g)
            yield self.proto[y] + torch.randn(20, 12, generator=self.g), y

    def train(self):
        m = self.ps_rref.rpc_sync().get_model()
        for i, (inputs, labels) in enumerate(self.get_next_batch()):
            loss = self.loss_fn(m(inputs), labels)
            m.zero_grad()
            loss.backward()
            m = rpc.rpc_sync(self.ps_rref.owner(), BatchUpdateParameterServer.update_and_fetch_model, args=(self.ps_rref, [p.grad for p in m.cpu().parameters()]))
            if i % 8 == 0:
                timed_log(f"{self.name} batch {i} loss {loss.item():.4f}")
        return loss.item()


def run_trainer(ps_rref):
    return Trainer(ps_rref).train()


def run_ps(trainers):
    timed_log("Start training")
    ps_rref = rpc.RRef(BatchUpdateParameterServer())
    futs = [rpc.rpc_async(t, run_trainer, args=(ps_rref,)) for t in trainers]
    timed_log(f"Finish training, last losses {torch.futures.wait_all(futs)}")


def run(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=60)
    if rank != 0:
        rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    else:
        rpc.init_rpc("ps", rank=rank, world_size=world_size, rpc_backend_options=options)
        run_ps([f"trainer{r}" for r in range(1, world_size)])
    rpc.shutdown()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    world_size = batch_update_size + 1
    mp.spawn(run, args=(world_size, port), nprocs=world_size, join=True)
