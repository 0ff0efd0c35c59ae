"""Instruction tuning with a small Trainer: completion-only labels, accumulation, token-exact loss normalisation."""
import json
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

IGNORE, PAD, VOCAB = -100, 0, 24


@dataclass
class TrainingArguments:
    output_dir: str = "sft_out"
    num_train_epochs: int = 4
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 16
    gradient_accumulation_steps: int = 3
    learning_rate: float = 5e-3
    max_grad_norm: float = 1.0
    seed: int = 17


class EchoDataset(Dataset):
    """prompt + SEP + the prompt again; only the second half carries labels"""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            k = int(torch.randint(2, 9, (1,), generator=g))
            a = torch.randint(3, 11, (k,), generator=g)
            self.rows.append((torch.cat([a, torch.tensor([1]), a + 11]), k + 1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, start = self.rows[i]
        labels = ids.clone()
        labels[:start] = IGNORE
        return {"input_ids": ids, "labels": labels}


def collate(rows):
    pad = lambda key, v: nn.utils.rnn.pad_sequence([r[key] for r in rows], batch_first=True, padding_value=v)
    return {"input_ids": pad("input_ids", PAD), "labels": pad("labels", IGNORE)}


class DistributedLengthGroupedSampler(Sampler):
    def __init__(self, lengths, global_batch, world, rank, seed):
        self.lengths, self.global_batch, self.world, self.rank, self.seed, self.epoch = lengths, global_batch, world, rank, seed, 0
        self.n = len(lengths) // world

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=g).tolist()
        mega = self.global_batch * 4
        blocks = [sorted(order[i:i + mega], key=lambda j: -self.lengths[j]) for i in range(0, len(order), mega)]
        flat = [j for b in blocks for j in b][: self.n * self.world]
        return iter(flat[self.rank::self.world])


class CausalLM(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(32, d)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 2, 96, 0.0, batch_first=True, norm_first=True) for _ in range(2))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, input_ids, labels, num_items_in_batch=None):
        t = input_ids.size(1)
        mask = torch.full((t, t), float("-inf")).triu(1)
        h = self.emb(input_ids) + self.pos.weight[:t]
        for layer in self.layers:
            if self.training:
                h = checkpoint(layer, h, mask, use_reentrant=False)
            else:
                h = layer(h, mask)
        logits = self.head(h)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=IGNORE, reduction="sum")
        return loss / (num_items_in_batch if num_items_in_batch is not None else 1), logits


class TrainerCallback:
    def on_log(self, state): ...


class PrinterCallback(TrainerCallback):
    def on_log(self, state):
        if dist.get_rank() == 0:
            print(json.dumps(state), flush=True)


class Trainer:
    def __init__(self, model, args, train_dataset, eval_dataset, callbacks):
        self.args, self.train_dataset, self.eval_dataset, self.callbacks = args, train_dataset, eval_dataset, callbacks
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.model = model
        self.model_wrapped = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model_wrapped.parameters(), lr=args.learning_rate)

    def get_batch_samples(self, iterator):
        batches = []
        for _ in range(self.args.gradient_accumulation_steps):
            b = next(iterator, None)
            if b is None:
                break
            batches.append(b)
        n = torch.tensor(float(sum((b["labels"][:, 1:] != IGNORE).sum().item() for b in batches)))
        dist.all_reduce(n)
        return batches, n

    def training_step(self, inputs, num_items, last):
        self.model_wrapped.train()
        self.model_wrapped.require_backward_grad_sync = last
        loss, _ = self.model_wrapped(**inputs, num_items_in_batch=num_items)
        (loss * self.world).backward()
        return loss.detach()

    def train(self):
        a = self.args
        lengths = [len(r[0]) for r in self.train_dataset.rows]
        sampler = DistributedLengthGroupedSampler(lengths, a.per_device_train_batch_size * self.world, self.world, self.rank, a.seed)
        loader = DataLoader(self.train_dataset, a.per_device_train_batch_size, sampler=sampler, collate_fn=collate)
        step, best = 0, float("inf")
        for epoch in range(a.num_train_epochs):
            sampler.set_epoch(epoch)
            iterator, left = iter(loader), len(loader)
            while left > 0:
                batches, n = self.get_batch_samples(iterator)
                left -= len(batches)
                total = sum(self.training_step(b, n, i == len(batches) - 1) for i, b in enumerate(batches))
                nn.utils.clip_grad_norm_(self.model_wrapped.parameters(), a.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
            dist.all_reduce(total)
            metrics = {"epoch": epoch, "step": step, "loss": round(total.item(), 4), **self.evaluate()}
            [c.on_log(metrics) for c in self.callbacks]
            if metrics["eval_loss"] < best:
                best = metrics["eval_loss"]
                if self.rank == 0:
                    os.makedirs(a.output_dir, exist_ok=True)
                    torch.save(self.model.state_dict(), f"{a.output_dir}/pytorch_model.bin")
                    json.dump(asdict(a) | metrics, open(f"{a.output_dir}/trainer_state.json", "w"))
        dist.barrier()
        self.model.load_state_dict(torch.load(f"{a.output_dir}/pytorch_model.bin", weights_only=True))
        return best

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        ds = self.eval_dataset
        loader = DataLoader(ds, self.args.per_device_eval_batch_size, sampler=DistributedSampler(ds, shuffle=False), collate_fn=collate)
        rows = []
        for b in loader:
            logits = self.model(**b)[1][:, :-1]
            target = b["labels"][:, 1:]
            ce = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=IGNORE, reduction="none").sum(1)
            keep = target != IGNORE
            ok = ((logits.argmax(-1) == target) | ~keep).all(1)
            rows.append(torch.stack([ce, keep.sum(1).float(), ok.float()], 1))
        mine = torch.cat(rows)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        rows = torch.stack(parts, 1).flatten(0, 1)[: len(ds)]      # interleaved back, padding cut off
        return {"eval_loss": (rows[:, 0].sum() / rows[:, 1].sum()).item(), "eval_exact": rows[:, 2].mean().item()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    args = TrainingArguments()
    torch.manual_seed(args.seed)
    trainer = Trainer(CausalLM(), args, EchoDataset(520, 0), EchoDataset(75, 1), [PrinterCallback()])
    best = trainer.train()
    final = trainer.evaluate()
    if dist.get_rank() == 0:
        print(f"best {best:.4f}, reloaded {final['eval_loss']:.4f}")
    dist.destroy_process_group()
