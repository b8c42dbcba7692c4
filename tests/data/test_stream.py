"""Streams: each pass gives every row once, shuffled in blocks. The draw depends on the seed only."""

import asyncio
import json
from dataclasses import replace
from itertools import islice

import pytest

from plaudit.data.fields import DataError
from plaudit.data.load import load_demonstrations, load_judgements, load_preferences, load_prompts
from plaudit.data.settings import DataSettings
from plaudit.loop.offline import OfflineSource
from plaudit.support.fields import check


@pytest.fixture
def settings(write):
    rows = [{"prompt": f"{i} ", "chosen": "a", "rejected": "b"} for i in range(10)]
    bad = write("b.jsonl", "nonsense\n" + json.dumps(rows[0]))
    return DataSettings(train=[write("a.jsonl", rows), bad], stream=4, bad_rows=1)


def numbers(tokenizer, items):
    return [int(tokenizer.decode((one if hasattr(one, "id") else one[0]).tokens).split()[0]) for one in items]


@pytest.mark.parametrize("load", [load_demonstrations, load_preferences, load_judgements, load_prompts])
def test_every_pass_has_each_row_once_shuffled_in_blocks(settings, tokenizer, load):
    data = load(settings, tokenizer, 3)
    drawn = numbers(tokenizer, islice(data.items, 22))
    for first in (0, 11):
        blocks = [drawn[first : first + 4], drawn[first + 4 : first + 8], drawn[first + 8 : first + 11]]
        assert [sorted(block) for block in blocks] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 8, 9]]
    assert drawn[:11] != drawn[11:], "each pass in its own order"
    assert drawn == numbers(tokenizer, islice(load(settings, tokenizer, 3).items, 22))
    assert drawn != numbers(tokenizer, islice(load(settings, tokenizer, 4).items, 22))
    later = load(settings, tokenizer, 3).items
    assert numbers(tokenizer, [later[17], later[2], later[21]]) == [drawn[17], drawn[2], drawn[21]]
    plain = load(replace(settings, shuffle=False), tokenizer, 3).items
    assert numbers(tokenizer, islice(plain, 12)) == [*range(10), 0, 0]


def test_a_resumed_source_goes_on_with_the_same_rows(settings, tokenizer):
    def source():
        data = load_demonstrations(settings, tokenizer, 3)
        return OfflineSource(data.items, data.cursor(3), batch_size=3, unit=1)

    whole = source()
    deliveries = [asyncio.run(whole.next()) for _ in range(6)]
    assert {(delivery.epoch, round(delivery.epochs_done, 9)) for delivery in deliveries} == {(1, 0)}
    for done in range(1, 6):
        resumed = source()
        resumed.restore({"draw": 3 * done})
        assert asyncio.run(resumed.next()).batch.tokens.tolist() == deliveries[done].batch.tokens.tolist()


def test_the_report_is_of_the_first_block_and_of_the_validation(settings, tokenizer, write):
    held = write("held.jsonl", [{"prompt": "q ", "completion": "a"}] * 2)
    data = load_demonstrations(replace(settings, validation=held), tokenizer, 0)
    assert len(data.validation) == 2
    assert [(source.role, source.kept) for source in data.report.sources][-1] == ("validation", 2)
    assert "streamed, counted is the first block, to train on, 2 for validation" in data.report.table()
    assert data.longest == settings.max_tokens


def test_streams_that_give_nothing_or_too_many_bad_rows(settings, tokenizer, write):
    nothing = write("c.jsonl", [{"prompt": "q" * 2000, "completion": "a"}])
    with pytest.raises(DataError, match=r"data.stream"):
        load_demonstrations(replace(settings, train=nothing, overlong="drop"), tokenizer, 0)
    items = load_demonstrations(replace(settings, bad_rows=0), tokenizer, 0).items
    with pytest.raises(DataError, match=r"b\.jsonl:1: .*JSON"):
        numbers(tokenizer, islice(items, 11))


@pytest.mark.parametrize("change", [{"validation": "5%"}, {"train": {"a": 1, "b": 1}}, {"stream": -1}])
def test_what_a_stream_cannot_do_is_refused(settings, change):
    with pytest.raises(ValueError, match=r"data\.stream="):
        check(replace(settings, **change), prefix="data.")
