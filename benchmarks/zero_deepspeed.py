"""DeepSpeed's side of `zero.py`: its engine around transformers' model, with torch's AdamW. Runs in .venv-deepspeed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from zero_rank import BETAS, BUCKET, EPS, LIMIT, MICRO, RANK, RATE, ROWS, WORLD, serve

CASE: dict[str, Any] = json.loads(sys.argv[1])


class DeepSpeed:
    name = "deepspeed"
    engine: Any

    def build(self, saved: str | None) -> None:
        import deepspeed
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(Path(CASE["start"]) / "model", dtype=torch.float32)
        zero = {"stage": CASE["stage"], "overlap_comm": False, "reduce_bucket_size": BUCKET}
        zero |= {"allgather_bucket_size": BUCKET, "stage3_prefetch_bucket_size": BUCKET}
        if CASE.get("offload"):
            zero["offload_optimizer"] = {"device": "cpu"}
        config = {
            "train_batch_size": ROWS,
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_clipping": LIMIT,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
        deepspeed.init_distributed("gloo", verbose=False)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.engine.train()
        if saved is not None:
            self.engine.load_checkpoint(saved, tag="all")

    def backward(self, rows: Tensor) -> None:
        """Up to the step's last one, which `step` makes."""
        parts = rows.chunk(WORLD)[RANK].split(MICRO)
        for number, part in enumerate(parts):
            if number:
                self.engine.step()
            self.engine.backward(self.engine(input_ids=part, labels=part, use_cache=False).loss)

    def gradient(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(p).clone() for name, p in self.engine.module.named_parameters()}

    def step(self) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm() or 0.0)  # none without shards

    def weights(self) -> dict[str, Tensor]:
        import deepspeed

        named = dict(self.engine.module.named_parameters())
        if CASE["stage"] < 3:
            return {name: p.detach().clone() for name, p in named.items()}
        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: p.detach().clone() for name, p in named.items()}

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder, tag="all")
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(DeepSpeed())
