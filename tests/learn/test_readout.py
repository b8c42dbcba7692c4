"""What a model is asked with: few numbers of rows, whose fillers neither change an answer nor send a gradient; and
what rows share, computed once."""

from __future__ import annotations

import pytest
import torch
from tiny import GPT2

from plaudit.batch import Batch
from plaudit.compute.axis import Axis
from plaudit.compute.context import Packed
from plaudit.compute.invariant import few
from plaudit.learn import readout
from plaudit.learn.readout import READOUTS, Teacher
from plaudit.models.base import LanguageModel
from plaudit.models.load import fresh_model
from plaudit.support.fields import SettingsError
from plaudit.types import Role, Row


def asked(sizes: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(len(sizes))
    rows = [
        Row(
            tokens=tuple(torch.randint(50, (size,), generator=generator).tolist()),
            trainable=(*(False,) * (size // 2), *(True,) * (size - size // 2)),
        )
        for size in sizes
    ]
    return Batch.of(rows)


def tiny(role: Role) -> LanguageModel:
    head = "lm" if role is Role.POLICY else "scalar"
    return fresh_model(GPT2, head=head, seed=0, vocab_size=50)  # type: ignore[arg-type]


def test_few_is_never_below_and_little_above() -> None:
    assert [few(n) for n in (0, 1, 63, 64, 65, 127, 128, 129, 1484)] == [0, 1, 63, 64, 66, 128, 128, 132, 1504]
    assert all(n <= few(n) <= n * 1.032 for n in range(1, 20_000))
    assert len({few(n) for n in range(1024, 8192)}) == 3 * 32 + 1


def test_batches_of_many_sizes_meet_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = tiny(Role.POLICY), set()
    trunk = set()
    model.register_forward_hook(lambda module, given, out: trunk.add(len(out)))
    plain = readout.chosen_logprobs

    def noted(hidden: torch.Tensor, *given: torch.Tensor, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
        head.add(len(hidden))
        return plain(hidden, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(readout, "chosen_logprobs", noted)
    for last in range(2, 16):
        READOUTS[Role.POLICY](model, asked([16] * 16 + [last]), 1.0)
    assert len(trunk) == 2
    assert len(head) <= 3


@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC, Role.JUDGE])
@pytest.mark.parametrize("sizes", [[9, 5, 16, 40, 3], [70, 64, 3], [3] * 43])  # 73, 137 and 129 tokens: all filled up
def test_fillers_change_no_answer_and_no_gradient(
    role: Role, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = asked(sizes)
    assert few(len(batch.tokens)) > len(batch.tokens)
    found = []
    for count in (few, lambda n: n):
        monkeypatch.setattr(readout, "few", count)
        model = tiny(role)
        out = READOUTS[role](model, batch, 1.0)
        columns = [x for x in (out.logprobs, out.entropy, out.values, out.scores) if x is not None]
        sum((x * torch.arange(1.0, len(x) + 1)).sum() for x in columns).backward()  # type: ignore[union-attr]
        found.append((columns, [parameter.grad for parameter in model.parameters()]))
    for ours, plain in zip(*(columns for columns, _ in found), strict=True):
        assert ours.shape == plain.shape
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    for ours, plain in zip(*(gradients for _, gradients in found), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-3, rtol=1e-4)


def test_reads_go_to_the_rank_and_run_that_have_their_tokens() -> None:
    """16 tokens in four runs; this rank has tokens 8 to 15. A run with fewer reads is filled up by its first token."""
    model = tiny(Role.POLICY)
    model.context_axis, model.axis = Axis(1, 2), Axis(0, 2, spread=True)
    mine, at, places = readout._mine(model, torch.tensor([3, 9, 14, 8, 15, 13]), 4)
    assert mine.tolist() == [1, 3, 2, 4, 5]
    assert at.tolist() == [0, 1, 3, 4, 5]
    assert places.tolist() == [1, 0, 0, 6, 7, 5]
    mine, at, places = readout._mine(model, torch.tensor([3]), 4)
    assert (mine.tolist(), at.tolist(), places.tolist()) == ([], [], [0, 4]), "ranks meet even if they read nothing"


def answered(prompts: list[int], samples: int) -> Batch:
    """Several answers to each prompt of a length."""
    generator = torch.Generator().manual_seed(samples)
    rows = []
    for group, size in enumerate(prompts):
        prompt = torch.randint(50, (size,), generator=generator).tolist()
        for _ in range(samples):
            answer = torch.randint(50, (int(torch.randint(1, 12, (), generator=generator)),), generator=generator)
            trainable = (*(False,) * size, *(True,) * len(answer))
            rows.append(Row(tokens=(*prompt, *answer.tolist()), trainable=trainable, group=group))
    return Batch.of(rows)


@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC, Role.JUDGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rows_share_changes_no_answer_and_no_gradient(role: Role, dtype: torch.dtype) -> None:
    batch, found = answered([9, 1, 20], 4), []
    for share in (False, True):
        model = tiny(role).to(dtype)
        out = READOUTS[role](model, batch, 1.0, share=share)
        columns = [x for x in (out.logprobs, out.entropy, out.values, out.scores) if x is not None]
        sum((x * torch.arange(1.0, len(x) + 1)).mean() for x in columns).backward()  # type: ignore[union-attr]
        found.append((columns, [parameter.grad for parameter in model.parameters()]))
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.05}
    for (plain_columns, plain), (columns, gradients) in [found]:
        for ours, expected in zip([*columns, *gradients], [*plain_columns, *plain], strict=True):
            torch.testing.assert_close(ours, expected, **near)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", [Role.REFERENCE, Role.CRITIC, Role.JUDGE])
@pytest.mark.usefixtures("kernels")
@torch.no_grad()
def test_without_gradients_what_rows_share_changes_no_bit(role: Role) -> None:
    model = tiny(Role.POLICY if role is Role.REFERENCE else role)
    alone, together = (READOUTS[role](model, answered([9, 1, 20], 4), 1.0, share=share) for share in (False, True))
    for name in ("logprobs", "entropy", "values", "scores"):
        ours, theirs = getattr(alone, name), getattr(together, name)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_a_prompt_is_computed_once_for_all_its_answers() -> None:
    model, counts = tiny(Role.POLICY), []
    model.layers[0].register_forward_hook(lambda module, given, out: counts.append(len(out)))  # type: ignore[operator, union-attr, index]
    batch = answered([30, 30], 8)
    for share in (False, True):
        READOUTS[Role.POLICY](model, batch, 1.0, share=share)
    assert counts[0] - counts[1] >= 7 * 60 * 0.95


def test_the_last_layer_goes_on_with_what_is_read_alone() -> None:
    model, counts = tiny(Role.JUDGE), []
    model.layers[-1].mlp.register_forward_hook(lambda module, given, out: counts.append(len(out)))  # type: ignore[operator, union-attr, index]
    READOUTS[Role.JUDGE](model, asked([20, 30]), 1.0)
    assert counts == [2]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3), (2, 0)])
@pytest.mark.usefixtures("kernels")
@torch.no_grad()
def test_whose_row_a_shared_prompt_is_read_from_changes_no_bit(order: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(50, (130,), generator=generator).tolist()
    lengths = (20, 90, 700, 3)
    rows = []
    for length in lengths:
        answer = torch.randint(50, (length,), generator=generator).tolist()
        rows.append(Row(tokens=(*prompt, *answer), trainable=(*(False,) * 130, *(True,) * length)))
    model = fresh_model(GPT2 | {"n_positions": 1024}, head="lm", seed=0, vocab_size=50)
    alone = [READOUTS[Role.REFERENCE](model, Batch.of([row]), 1.0).logprobs for row in rows]
    together = READOUTS[Role.REFERENCE](model, Batch.of([rows[number] for number in order]), 1.0).logprobs
    assert together is not None
    for found, number in zip(together.split([130 + lengths[number] for number in order]), order, strict=True):
        assert torch.equal(found, alone[number]), number  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("kernels")
@torch.no_grad()
def test_a_long_row_is_answered_as_if_alone(dtype: torch.dtype) -> None:
    """Ours takes other products from 256 keys on."""
    generator = torch.Generator().manual_seed(0)
    model = fresh_model(GPT2 | {"n_positions": 1100}, head="lm", seed=0, vocab_size=50).to(dtype)
    for mine, others in ((176, 193), (190, 200), (250, 260), (297, 328), (663, 723), (760, 775)):
        rows = [
            Row(
                tokens=tuple(torch.randint(50, (n,), generator=generator).tolist()),
                trainable=(False, *(True,) * (n - 1)),
            )
            for n in (mine, others, others)
        ]
        alone, together = (READOUTS[Role.REFERENCE](model, Batch.of(part), 1.0).logprobs for part in (rows[:1], rows))
        assert alone is not None
        assert together is not None
        assert torch.equal(alone, together[:mine]), (mine, others)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_policy_is_compared_with_a_larger_teacher_over_the_whole_vocabulary(temperature: float) -> None:
    """The KL of each trained token and its gradient, beside autograd through both models' whole logits."""
    policy = fresh_model({**GPT2, "initializer_range": 0.3}, seed=0, vocab_size=50)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": 64, "initializer_range": 0.3}  # type: ignore[dict-item]
    teacher = fresh_model({"model_type": "llama", "num_key_value_heads": 1, **sizes}, seed=1, vocab_size=60)
    batch = asked([9, 2, 16, 5])
    weight = torch.linspace(0.5, 2.0, len(batch.tokens)) * batch.trainable

    def logits(model: LanguageModel) -> torch.Tensor:
        context = Packed(batch.lengths.tolist(), device="cpu", window=None, index=None)
        states = model(batch.tokens, context, batch.trainable.nonzero()[:, 0] - 1)
        return torch.log_softmax(model.head(states) / temperature, -1)

    logp = logits(policy)
    expected = torch.zeros(len(batch.tokens))
    expected[batch.trainable] = (logp.exp() * (logp - logits(teacher).detach()[:, :50])).sum(-1)
    (expected * weight).sum().backward()  # type: ignore[no-untyped-call]
    naive = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    output = Teacher.of(teacher, policy).compared(policy, batch, temperature)
    assert output.divergence is not None
    torch.testing.assert_close(output.divergence, expected.detach(), atol=1e-5, rtol=1e-4)
    plain = READOUTS[Role.POLICY](policy, batch, temperature)
    torch.testing.assert_close(output.logprobs, plain.logprobs)
    (output.divergence * weight).sum().backward()  # type: ignore[no-untyped-call]
    got = [p.grad for p in policy.parameters() if p.grad is not None]
    assert len(got) == len(naive) and max(float(one.abs().max()) for one in naive) > 0.1
    for mine, theirs in zip(got, naive, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
    assert all(p.grad is None for p in teacher.parameters())
    with pytest.raises(SettingsError, match=r"whole_vocabulary=true.*50 .*60"):
        Teacher.of(policy, teacher)
