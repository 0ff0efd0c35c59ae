"""A Trainer with TrainingArguments, callbacks and a gather that drops the sampler's padding."""
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class TrainingArguments:
    output_dir: Optional[str] = None
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    learning_rate: float = 5e-3
    num_train_epochs: int = 3
    warmup_ratio: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 42
    report_to: list = field(default_factory=lambda: ["stdout"])

    @property
    def process_index(self):
        return int(os.environ.get("RANK", 0))

    @property
    def world_size(self):
        return int(os.environ.get("WORLD_SIZE", 1))


class SentencePairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, 60, (n, 12), generator=g)
        self.labels = ((self.ids < 20).sum(1) > (self.ids > 40).sum(1)).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i], "idx": i}


class Classifier(nn.Module):
    def __init__(self, vocab=60, d=24):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, d)
        self.encoder = nn.TransformerEncoderLayer(d, 2, 48, dropout=0.1, batch_first=True)
        self.classifier = nn.Linear(d, 2)

    def forward(self, input_ids, labels=None):
        logits = self.classifier(self.encoder(self.embeddings(input_ids)).mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class PrinterCallback:
    def on_log(self, args, state, logs):
        if args.process_index == 0:
            print(json.dumps({k: round(float(v), 4) for k, v in logs.items()}))


class Trainer:
    def __init__(self, model_init: Callable[[], nn.Module], args: TrainingArguments, train_dataset, eval_dataset, callbacks=()):
        dist.init_process_group("gloo")
        torch.manual_seed(args.seed)
        self.model = model_init()
        torch.manual_seed(args.seed + 1000 * (1 + args.process_index))  # dropout must not repeat on the other ranks
        self.args, self.train_dataset, self.eval_dataset = args, train_dataset, eval_dataset
        self.callbacks = list(callbacks)
        self.state: dict[str, Any] = {"global_step": 0, "epoch": 0.0}

    def create_optimizer_and_scheduler(self, total):
        no_decay = [p for n, p in self.model.named_parameters() if "bias" in n or "norm" in n]
        decay = [p for n, p in self.model.named_parameters() if not ("bias" in n or "norm" in n)]
        self.optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}], lr=self.args.learning_rate)
        warm = max(1, int(total * self.args.warmup_ratio))
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: (s + 1) / warm if s < warm else max(0.0, (total - s) / max(1, total - warm)))

    def log(self, logs):
        for cb in self.callbacks:
            cb.on_log(self.args, self.state, logs)

    def train(self):
        args = self.args
        sampler = DistributedSampler(self.train_dataset, seed=args.seed, drop_last=True)
        loader = DataLoader(self.train_dataset, args.per_device_train_batch_size, sampler=sampler, drop_last=True)
        updates = len(loader) // args.gradient_accumulation_steps
        self.create_optimizer_and_scheduler(updates * args.num_train_epochs)
        self.model_wrapped = DistributedDataParallel(self.model)
        for epoch in range(args.num_train_epochs):
            sampler.set_epoch(epoch)
            self.model_wrapped.train()
            tr_loss = torch.zeros(())
            iterator = iter(loader)
            for _ in range(updates):
                batches = [next(iterator) for _ in range(args.gradient_accumulation_steps)]
                for i, inputs in enumerate(batches):
                    last = i == len(batches) - 1
                    if last:
                        tr_loss += self.training_step(inputs)
                    else:
                        with self.model_wrapped.no_sync():
                            tr_loss += self.training_step(inputs)
                nn.utils.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
                self.optimizer.step()
                self.lr_scheduler.step()
                self.model.zero_grad()
                self.state["global_step"] += 1
            dist.all_reduce(tr_loss)
            self.log({"loss": tr_loss / (updates * args.world_size), "learning_rate": self.lr_scheduler.get_last_lr()[0], "epoch": epoch + 1})
            self.log(self.evaluate())
        self.save_model()

    def training_step(self, inputs):
        loss = self.model_wrapped(inputs["input_ids"], inputs["labels"])["loss"] / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        n = len(self.eval_dataset)
        loader = DataLoader(self.eval_dataset, 8, sampler=DistributedSampler(self.eval_dataset, shuffle=False))
        mine = [(int(i), int(p), int(t)) for b in loader
                for i, p, t in zip(b["idx"], self.model(b["input_ids"])["logits"].argmax(-1), b["labels"])]
        everyone = [None] * self.args.world_size
        dist.all_gather_object(everyone, mine)
        unique = {i: (p, t) for part in everyone for i, p, t in part}  # the padded copies fall out here
        assert len(unique) == n
        return {"eval_accuracy": sum(p == t for p, t in unique.values()) / n, "eval_samples": n}

    def save_model(self):
        if self.args.process_index == 0:
            folder = tempfile.mkdtemp(prefix="trainer-")
            torch.save(self.model.state_dict(), os.path.join(folder, "pytorch_model.bin"))
            with open(os.path.join(folder, "trainer_state.json"), "w") as f:
                json.dump(self.state, f)
            shutil.rmtree(folder)
        dist.barrier()


if __name__ == "__main__":
    trainer = Trainer(Classifier, TrainingArguments(), SentencePairs(256, 1), SentencePairs(51, 2), [PrinterCallback()])
    trainer.train()
    assert not math.isnan(trainer.state["epoch"])
    dist.destroy_process_group()
