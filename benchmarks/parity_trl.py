"""TRL's own loss code on given log-probs: one function a loss, () from a problem and its log-probs.

Methods of TRL's trainers are called on a bare object that holds the settings they read, since a trainer wants a whole
model. Where TRL has a formula in the middle of a long function, its lines are cut out of the installed file and run.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import textwrap
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from parity_problem import Problem
from torch import Tensor, nn
from torch.nn import functional as F


def lines(source: str, first: str, last: str, **names: Any) -> dict[str, Any]:
    """Run the lines of `source` from the one with `first` to the next one with `last`; return all names."""
    text = source.splitlines()
    start = next(number for number, line in enumerate(text) if first in line)
    stop = next(number for number in range(start, len(text)) if last in text[number])
    exec(textwrap.dedent("\n".join(text[start : stop + 1])), names)
    return names


def shell(**settings: Any) -> SimpleNamespace:
    """What TRL's methods read of their trainer."""

    def same(x: Tensor, **_: Any) -> Tensor:
        return x

    device = torch.device("cpu")
    accelerator = SimpleNamespace(
        device=device, gather=same, gather_for_metrics=same, reduce=same, num_processes=1, parallelism_config=None
    )
    common = {"aux_loss_enabled": False, "_total_train_tokens": 0, "_tp_size": 1, "is_encoder_decoder": False}
    metrics = {"eval": defaultdict(list)}
    return SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=accelerator, _metrics=metrics, **common, **settings
    )


def halves(problem: Problem) -> Tensor:
    """Order of rows: all chosen answers before all rejected ones."""
    return torch.arange(len(problem.lengths)).view(-1, 2).t().reshape(-1)


def outputs(trained: Tensor) -> SimpleNamespace:
    zeros = torch.zeros_like(trained)
    return SimpleNamespace(log_probs=trained, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def padded(mask: Tensor) -> Tensor:
    """The mask behind one token of the prompt."""
    return torch.cat((torch.zeros(len(mask), 1, dtype=torch.bool), mask), 1).long()


def dpo(problem: Problem, current: Tensor, *, name: str, beta: float, smoothing: float = 0.0) -> Tensor:
    from trl import DPOTrainer

    order = halves(problem)
    trained, mask = (current * problem.mask)[order], padded(problem.mask[order])
    chosen, rejected = (problem.reference * problem.mask)[order].sum(1).chunk(2)
    trainer = shell(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
    )
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs(trained), inputs, False)


def kto(problem: Problem, current: Tensor, *, beta: float, desirable: float, undesirable: float) -> Tensor:
    """Odd rows are the mismatched answers."""
    from trl.trainer.kto_trainer import KTOTrainer

    mask = padded(problem.mask)
    old, reference = (problem.old * problem.mask).sum(1), (problem.reference * problem.mask).sum(1)
    trained = (current * problem.mask)[::2]
    trainer = shell(
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=beta,
        desirable_weight=desirable,
        undesirable_weight=undesirable,
        _compute_kl_logps=lambda *_: old[1::2],
    )
    inputs = {
        "label": problem.rewards[::2] > 0,
        "input_ids": torch.zeros_like(mask[::2]),
        "attention_mask": torch.ones_like(mask[::2]),
        "completion_mask": mask[::2],
        "ref_logps": reference[::2],
        "ref_KL_logps": reference[1::2],
    }
    return KTOTrainer._compute_loss(trainer, lambda **_: outputs(trained), inputs, False)


def binary(problem: Problem, current: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Logits over two tokens, of which token 0 has the log-prob `current`, one place ahead of their labels."""
    certain = current.clamp(max=-1e-12)
    logits = F.pad(torch.stack((certain, torch.log(-torch.expm1(certain))), -1)[order], (0, 0, 0, 1))
    labels = F.pad(torch.where(problem.mask[order], 0, -100), (1, 0), value=-100)
    return logits, labels


def sft(problem: Problem, current: Tensor) -> Tensor:
    """SFTTrainer leaves the loss to transformers, with the step's number of trained tokens."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits, labels = binary(problem, current, torch.arange(len(problem.lengths)))
    return ForCausalLMLoss(logits, labels, vocab_size=2, num_items_in_batch=(labels >= 0).sum())


def orpo(problem: Problem, current: Tensor, *, beta: float, prompt: bool) -> Tensor:
    """With `prompt`, TRL's likelihood counts two tokens of a prompt too, as it does of every prompt."""
    from trl.experimental.orpo import ORPOTrainer

    logits, labels = binary(problem, current, halves(problem))
    attended = (labels >= 0).long()
    if prompt:
        before = torch.full((*logits.shape[:1], 2, 2), math.log(0.5), dtype=logits.dtype)
        logits, labels = torch.cat((before, logits), 1), F.pad(labels, (2, 0), value=-100)
        attended = F.pad(attended[:, 1:], (3, 0), value=1)
    batch = {"concatenated_input_ids": torch.zeros_like(labels), "concatenated_attention_mask": attended}
    inputs = batch | {"concatenated_labels": labels}
    trainer = shell(beta=beta, label_pad_token_id=-100, padding_value=0)
    trainer.odds_ratio_loss = lambda *given: ORPOTrainer.odds_ratio_loss(trainer, *given)
    return of_both(ORPOTrainer, trainer, logits, inputs)


def simpo(problem: Problem, current: Tensor, *, beta: float, gamma: float, imitated: float = 0.0) -> Tensor:
    from trl.experimental.cpo import CPOTrainer

    logits, labels = binary(problem, current, halves(problem))
    inputs = {f"concatenated_{name}": labels for name in ("input_ids", "attention_mask", "labels")}
    own = {"loss_type": "simpo", "simpo_gamma": gamma, "cpo_alpha": imitated, "alpha": 0.0, "label_smoothing": 0.0}
    trainer = shell(beta=beta, pad_token_id=0, **own)
    trainer.cpo_loss = lambda *given: CPOTrainer.cpo_loss(trainer, *given)
    return of_both(CPOTrainer, trainer, logits, inputs)


def of_both(kind: Any, trainer: SimpleNamespace, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The loss of a trainer that passes chosen and rejected answers through the model at once."""
    trainer.concatenated_inputs = lambda *_, **__: inputs
    trainer.get_batch_logps = kind.get_batch_logps
    trainer.concatenated_forward = lambda *given: kind.concatenated_forward(trainer, *given)
    model = lambda *_, **__: SimpleNamespace(logits=logits)  # noqa: E731
    return kind.get_batch_loss_metrics(trainer, model, {"chosen_labels": logits[: len(logits) // 2]})[0]


def reward(problem: Problem, current: Tensor, *, centring: float) -> Tensor:
    from trl import RewardTrainer

    scores = current[:, 0][halves(problem)]
    trainer = shell(args=SimpleNamespace(center_rewards_coefficient=centring or None))
    model = lambda **_: SimpleNamespace(logits=scores[:, None])  # noqa: E731
    return RewardTrainer.compute_loss(trainer, model, {"margin": problem.margins})


def policy_inputs(problem: Problem) -> dict[str, Tensor]:
    mask = problem.mask.long()
    prompt = torch.zeros(len(mask), 2, dtype=torch.int64)
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": problem.advantages,
        "old_per_token_logps": problem.old,
        "old_logps": (problem.old * mask).sum(1),
        "ref_per_token_logps": problem.reference,
        "num_items_in_batch": mask.sum(),
    }


def policy_shell(current: Tensor, **settings: Any) -> SimpleNamespace:
    return shell(
        _get_per_token_logps_and_entropies=lambda *_, **__: (current, torch.zeros_like(current), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        **settings,
    )


def grpo(
    problem: Problem,
    current: Tensor,
    *,
    name: str,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.0,
    corrected: bool = True,
    level: str = "token",
) -> Tensor:
    from trl import GRPOTrainer

    inputs = policy_inputs(problem)
    if problem.tools is not None:
        inputs |= {"completion_mask": (problem.mask | problem.tools).long(), "tool_mask": (~problem.tools).long()}
    trainer = policy_shell(
        current,
        importance_sampling_level=level,
        beta=kl,
        args=SimpleNamespace(use_bias_correction_kl=corrected, delta=None, steps_per_generation=1),
        loss_type=name,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        max_completion_length=9,
    )
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def cut(problem: Problem) -> Problem:
    """The problem with every second answer cut off, which TRL's lines take out of the mask."""
    from trl import GRPOTrainer

    rows = zip(problem.lengths, itertools.cycle((2, 3)))
    tokenizer = SimpleNamespace(pad_token_id=0)
    found = lines(
        inspect.getsource(GRPOTrainer._generate_and_score_completions),
        "if self.mask_truncated_completions:",
        "completion_mask = completion_mask * (~is_truncated)",
        torch=torch,
        self=SimpleNamespace(mask_truncated_completions=True, eos_token_ids=[2], _tokenizer=tokenizer),
        device="cpu",
        completion_ids_list=[[1] * (length - 1) + [last] for length, last in rows],
        completion_mask=problem.mask.long(),
    )
    return replace(problem, mask=found["completion_mask"].bool())


def episodes(problem: Problem) -> Problem:
    """The problem with answers of several turns: every third token of an answer, from the second on, is a tool's."""
    said = problem.mask & (torch.arange(problem.mask.shape[1]) % 3 == 1)
    return replace(problem, mask=problem.mask & ~said, tools=said)


def rloo(problem: Problem, current: Tensor) -> Tensor:
    from trl import RLOOTrainer

    return RLOOTrainer._compute_loss(
        policy_shell(current, epsilon_low=0.2, epsilon_high=0.2), None, policy_inputs(problem)
    )


def group_advantages(problem: Problem, *, scale: str) -> Tensor:
    from trl import GRPOTrainer
    from trl.trainer.utils import nanstd

    trainer = shell(scale_rewards=scale, reward_weights=torch.ones(1))
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    source = source[source.index("            rewards = (rewards_per_func") :]
    names = {"rewards_per_func": problem.rewards[:, None], "num_generations": problem.group, "nanstd": nanstd}
    mask = torch.zeros(len(problem.rewards), dtype=torch.bool)
    return lines(
        source,
        "rewards = (rewards_per_func",
        "advantages = advantages / (std_rewards",
        torch=torch,
        self=trainer,
        device="cpu",
        unscorable_mask=mask,
        **names,
    )["advantages"]


def rloo_advantages(problem: Problem, *, beta: float) -> Tensor:
    from trl import RLOOTrainer
    from trl.trainer.utils import nanstd

    trainer = shell(beta=beta, reward_clip_range=None, reward_weights=torch.ones(1), normalize_advantages=False)
    columns = policy_inputs(problem)
    return lines(
        inspect.getsource(RLOOTrainer._generate_and_score_completions),
        "unscorable_mask =",
        "advantages = torch.nan_to_num",
        torch=torch,
        self=trainer,
        device="cpu",
        gather=lambda x: x,
        nanstd=nanstd,
        rewards_per_func=problem.rewards[:, None],
        num_generations=problem.group,
        old_per_token_logps=columns["old_per_token_logps"],
        ref_per_token_logps=columns["ref_per_token_logps"],
        completion_mask=columns["completion_mask"],
    )["advantages"]


def untied(problem: Problem) -> Tensor:
    """Rewards of which none equals another."""
    return problem.rewards + 1e-3 * torch.arange(len(problem.rewards))


def online_dpo(problem: Problem, current: Tensor, *, beta: float) -> Tensor:
    from trl.experimental.online_dpo import OnlineDPOTrainer

    pairs, order = len(problem.lengths) // 2, halves(problem)
    return lines(
        inspect.getsource(OnlineDPOTrainer.training_step),
        "first_half, second_half = rewards.split",
        "loss = losses.mean()",
        torch=torch,
        F=F,
        self=SimpleNamespace(args=SimpleNamespace(loss_type="sigmoid"), beta=beta),
        rewards=untied(problem)[order],
        batch_size=pairs,
        device="cpu",
        logprobs=current[order],
        ref_logprobs=problem.reference[order],
        completion_mask=problem.mask[order],
    )["loss"]


class OfPPO:
    """PPO's lines from the file of the last TRL that has them. The file is not imported: two TRLs do not live in one
    process."""

    def __init__(self, folder: Path):
        self.source = (folder / "trl" / "experimental" / "ppo" / "ppo_trainer.py").read_text(encoding="utf-8")
        wanted = ("masked_mean", "masked_var", "masked_whiten")
        tree = ast.parse(self.source)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
        self.names: dict[str, Any] = {"torch": torch}
        exec(compile(ast.Module(functions, []), "ppo_trainer.py", "exec"), self.names)

    def whiten(self, grid: Tensor, mask: Tensor) -> Tensor:
        return self.names["masked_whiten"](grid, mask)

    def credit(self, problem: Problem, *, beta: float, discount: float, trace: float) -> dict[str, Tensor]:
        """Advantages, whitened, and returns."""
        width = problem.mask.shape[1]
        place = torch.tensor(problem.lengths)
        settings = {"kl_estimator": "k1", "kl_coef": beta, "whiten_rewards": False, "gamma": discount, "lam": trace}
        return lines(
            self.source,
            "logr = ref_logprobs - logprobs",
            "advantages = torch.masked_fill(advantages, padding_mask, 0)",
            **self.names,
            args=SimpleNamespace(**settings),
            ref_logprobs=problem.reference * problem.mask,
            logprobs=problem.old * problem.mask,
            sequence_lengths=place - 1,
            sequence_lengths_p1=place - 1,  # the reward is on the answer's last token, as ours
            scores=problem.rewards,
            values=problem.values * problem.mask,
            responses=torch.zeros(len(place), width),
            padding_mask=~problem.mask,
            padding_mask_p1=~problem.mask,
        )

    def loss(self, problem: Problem, current: Tensor, values: Tensor, *, factor: float) -> Tensor:
        rows = slice(None)
        return lines(
            self.source,
            "vpredclipped = torch.clamp(",
            "loss = pg_loss + args.vf_coef * vf_loss",
            **self.names,
            args=SimpleNamespace(cliprange_value=0.2, cliprange=0.2, vf_coef=factor),
            vpred=values,
            mb_values=problem.values,
            mb_return=problem.returns,
            new_logprobs=current,
            mb_logprobs=problem.old,
            mb_advantage=problem.advantages[:, None].expand_as(current),
            padding_mask=~problem.mask,
            padding_mask_p1=~problem.mask,
            micro_batch_inds=rows,
        )["loss"]


def adamw(weights: Tensor, loss: Tensor, *, rate: float, limit: float) -> Tensor:
    """Weights after the step that TRL's trainers make: transformers' clip, then torch's AdamW."""
    parameter = nn.Parameter(weights.detach().clone())
    parameter.grad = torch.autograd.grad(loss, weights)[0]
    nn.utils.clip_grad_norm_([parameter], limit)
    torch.optim.AdamW([parameter], lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    return parameter.detach()
