#!/usr/bin/env python
"""Fine-tuning a frozen causal language model with low-rank adapters, plain loop without a trainer library."""
import argparse
import json
import logging
import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger(__name__)
PAD, BOS, SEP, EOS, VOCAB = 0, 1, 2, 3, 32


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2, self.attn = nn.RMSNorm(d), nn.RMSNorm(d), Attention(d, heads)
        self.up_proj, self.down_proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x, mask):
        x = x + self.attn(self.n1(x), mask)
        return x + self.down_proj(F.silu(self.up_proj(self.n2(x))))


class CausalLM(nn.Module):
    def __init__(self, d=64, heads=4, layers=2, max_len=32):
        super().__init__()
        self.embed_tokens, self.embed_pos = nn.Embedding(VOCAB, d), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, input_ids, attention_mask):
        t = input_ids.size(1)
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        # a padded query row sees itself, so that no row is empty
        mask = (causal & attention_mask[:, None, None, :].bool()) | torch.eye(t, dtype=torch.bool)
        x = self.embed_tokens(input_ids) + self.embed_pos(torch.arange(t))
        for layer in self.layers:
            x = layer(x, mask)
        return self.lm_head(self.norm(x))


class LoraLinear(nn.Module):
    def __init__(self, base, r, alpha, dropout):
        super().__init__()
        self.base = base
        self.lora_A, self.lora_B = nn.Linear(base.in_features, r, bias=False), nn.Linear(r, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.scaling, self.drop = alpha / r, nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(self.drop(x))) * self.scaling


def get_peft_model(model, r, alpha, dropout, targets, modules_to_save):
    for p in model.parameters():
        p.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, r, alpha, dropout))
    for name in modules_to_save:
        getattr(model, name).requires_grad_(True)
    return model


def build_dataset(n, seed):
    """prompt: a few symbols; answer: each of them moved on by three, in the same order."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        k = int(torch.randint(2, 9, (1,), generator=g))
        src = torch.randint(4, VOCAB, (k,), generator=g)
        dst = (src - 4 + 3) % (VOCAB - 4) + 4
        ids = torch.cat([torch.tensor([BOS]), src, torch.tensor([SEP]), dst, torch.tensor([EOS])])
        labels = ids.clone()
        labels[: k + 2] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def data_collator(rows):
    t = max(len(r["input_ids"]) for r in rows)
    batch = {"input_ids": torch.full((len(rows), t), PAD), "labels": torch.full((len(rows), t), -100),
             "attention_mask": torch.zeros(len(rows), t, dtype=torch.long)}
    for i, r in enumerate(rows):
        n = len(r["input_ids"])
        batch["input_ids"][i, :n], batch["labels"][i, :n], batch["attention_mask"][i, :n] = r["input_ids"], r["labels"], 1
    return batch


def loss_sum(model, batch):
    logits = model(batch["input_ids"], batch["attention_mask"])[:, :-1]
    return F.cross_entropy(logits.reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1), ignore_index=-100,
                           reduction="sum")


def get_scheduler(optimizer, warmup, total):
    return LambdaLR(optimizer, lambda s: (s + 1) / warmup if s < warmup else max(0.0, (total - s) / (total - warmup)))


@torch.no_grad()
def evaluate(model, rows, rank, world, batch_size):
    model.eval()
    mine, sums = rows[rank::world], torch.zeros(2, dtype=torch.float64)
    for i in range(0, len(mine), batch_size):
        batch = data_collator(mine[i:i + batch_size])
        sums += torch.tensor([loss_sum(model, batch).item(), (batch["labels"][:, 1:] != -100).sum().item()])
    dist.all_reduce(sums)
    model.train()
    return math.exp((sums[0] / sums[1]).item())


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--per_device_train_batch_size", type=int, default=16)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--num_train_epochs", type=int, default=4)
    p.add_argument("--learning_rate", type=float, default=2e-2)
    p.add_argument("--num_warmup_steps", type=int, default=8)
    p.add_argument("--lora_r", type=int, default=8)
    p.add_argument("--seed", type=int, default=17)
    p.add_argument("--output_dir", default="lora_out")
    return p.parse_args()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(format="%(levelname)s - %(message)s", level=logging.INFO if rank == 0 else logging.ERROR)
    torch.manual_seed(args.seed)
    model = get_peft_model(CausalLM(), args.lora_r, 16, 0.02, {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj",
                                                               "down_proj"}, ["embed_pos", "lm_head"])
    torch.manual_seed(args.seed + 1 + rank)  # dropout
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    logger.info("trainable params: %d of %d", trainable, sum(p.numel() for p in model.parameters()))
    model = DistributedDataParallel(model)
    train_rows, eval_rows = build_dataset(1536, 1), build_dataset(203, 2)
    sampler = DistributedSampler(train_rows, shuffle=True, seed=args.seed)
    loader = DataLoader(train_rows, batch_size=args.per_device_train_batch_size, sampler=sampler,
                        collate_fn=data_collator)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  weight_decay=0.0)
    accum = args.gradient_accumulation_steps
    updates = math.ceil(len(loader) / accum)
    scheduler = get_scheduler(optimizer, args.num_warmup_steps, updates * args.num_train_epochs)
    completed = 0
    for epoch in range(args.num_train_epochs):
        sampler.set_epoch(epoch)
        model.train()
        it = iter(loader)
        for update in range(updates):
            window = [b for _, b in zip(range(accum), it)]
            num_items = torch.tensor([sum(int((b["labels"][:, 1:] != -100).sum()) for b in window)])
            dist.all_reduce(num_items)
            total = 0.0
            for k, batch in enumerate(window):
                with nullcontext() if k == len(window) - 1 else model.no_sync():
                    # DDP divides by the number of processes, the loss is per target token of all of them
                    loss = loss_sum(model, batch) * world / num_items.item()
                    loss.backward()
                total += loss.item() / world
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            completed += 1
            if completed % 24 == 0:
                shown = torch.tensor(total)
                dist.all_reduce(shown)
                logger.info("step %d loss %.4f lr %.2e", completed, shown.item(), scheduler.get_last_lr()[0])
        ppl = evaluate(model.module, eval_rows, rank, world, 32)
        logger.info("epoch %d: perplexity: %.3f", epoch, ppl)
    if rank == 0:
        os.makedirs(args.output_dir, exist_ok=True)
        names = {n for n, p in model.module.named_parameters() if p.requires_grad}
        torch.save({k: v for k, v in model.module.state_dict().items() if k in names},
                   os.path.join(args.output_dir, "adapter_model.bin"))
        with open(os.path.join(args.output_dir, "all_results.json"), "w") as f:
            json.dump({"perplexity": ppl}, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
