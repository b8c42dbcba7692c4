"""Rows as records and records as rows, in one call each."""

from plaudit.data import tokenize
from plaudit.data.formats import demonstration_of, preference_of, sample
from plaudit.data.reader import Reader
from plaudit.data.records import DEMONSTRATION, PREFERENCE, QUESTION
from plaudit.data.report import Tally


def demonstration(row, **how):
    return demonstration_of(sample(row, kind=DEMONSTRATION, **how)[0])


def preference(row, **how):
    return preference_of(sample(row, kind=PREFERENCE, **how)[0])


def question(row, **how):
    return sample(row, kind=QUESTION, **how)[0]


def _tokenised(read):
    def rows(records, tokenizer, settings, *, ends=(), tally=None, **further):
        return read(records, Reader(tokenizer, settings, ends), tally or Tally(source=""), **further)

    return rows


demonstration_rows = _tokenised(tokenize.demonstration_rows)
preference_rows = _tokenised(tokenize.preference_rows)
judgement_rows = _tokenised(tokenize.judgement_rows)
prompts = _tokenised(tokenize.prompts)
