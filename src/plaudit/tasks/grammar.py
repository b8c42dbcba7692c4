"""The grammar of the demo task: film comments, their words' sentiment, a sampler, and the word pairs it can produce.

`demo.py` says what a comment is worth. A rule is `name = alternative | alternative`; `<name>` is another rule, all
else is words. If a rule's name ends in `~`, it exists once for each tone (`+` and `-`): `~` stands for the tone and `!`
for the opposite one. An alternative written twice is drawn twice as often. Words are joined by single spaces.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise

RULES_TEXT = """
comment = <prompt.one> <body.one> | <prompt.many> <body.many>
body.one = <start.one> | <start.one> <more>
body.many = <start.many> | <start.many> <more>
start.one = <start.one+> | <start.one-> | <start.one0>
start.many = <start.many+> | <start.many-> | <start.many0>
more = <sentence> | <sentence> <more>
sentence = <sentence+> | <sentence-> | <sentence0>

prompt.one = <opening> . <lead.one> <aspect.one> | <opening> . It | <opening> . The film
prompt.many = <opening> . <lead.one> <aspect.many>
lead.one = The | The | The | I think the | To me the | Honestly , the | Here the
opening = I watched <film> <when> | We saw <film> <when> | I finally saw <film> <when> | We went to see <film> <when>
    | A friend showed me <film> <when> | My <relative> and I watched <film> <when> | <film> was on television <when>
when = last night | last week | on Sunday | on Friday | on Tuesday | yesterday | this weekend | in the holidays
    | this morning | two days ago
film = The <film.first> <film.second>
film.first = Silver | Crimson | Hidden | Last | Broken | Golden | Silent | Northern | Distant | Paper | Winter | Glass
    | Iron | Hollow | Secret | Burning | Frozen | Wooden | Second | Velvet | Empty | Midnight | Scarlet | Copper
film.second = Harbor | River | Garden | Station | Mirror | Bridge | Lantern | Island | Orchard | Letter | Tower | Valley
    | Highway | Kingdom | Summer | Shore | Signal | Window | Voyage | Compass | Circus | Forest | Canyon | Ferry

start.one~ = <rest.one~> . | <rest.one~> . | <rest.one~> and <clause~> . | <rest.one!> , but <clause~> .
    | <rest.one~> , and <neutral> .
start.many~ = <rest.many~> . | <rest.many~> . | <rest.many~> and <clause~> . | <rest.many!> , but <clause~> .
    | <rest.many~> , and <neutral> .
start.one0 = was the work of a <role> from <place> . | reminded me of <film> . | took <number> years to finish .
start.many0 = were the work of a <role> from <place> . | reminded me of <film> . | took <number> years to finish .
sentence~ = <Clause~> . | <Clause~> . | <Clause~> . | <Clause~> and <clause~> . | <Clause!> , but <clause~> .
    | Although <clause!> , <clause~> . | <lead> , <clause~> . | I would <advice~> it to <reader> .
    | I would not <advice!> it to <reader> .
sentence0 = <Neutral> . | <Neutral> and <neutral> . | <Neutral> , but <neutral> .
lead = Overall | Frankly | In short | For me | All in all | Of course

clause~ = the <aspect.one> <rest.one~> | the <aspect.one> <rest.one~> | the <aspect.many> <rest.many~> | it <rest.one~>
    | I <feeling~> <object> | my <relative> <feeling~> <object> | I found <object> to be <quality~>
    | it is a <adjective~> film | it is a <noun~> | it is a <real> <noun~> | it was <not> a <noun!>
rest.one~ = is <quality~> | is <quality~> | was <quality~> | seems <quality~> | felt <quality~> | <verb.one~>
    | <verb.one~> from start to finish | never <verb.one!>
rest.many~ = are <quality~> | are <quality~> | were <quality~> | seem <quality~> | felt <quality~> | <verb.many~>
    | <verb.many~> from start to finish | never <verb.many!>
quality~ = <adjective~> | <adjective~> | <degree> <adjective~> | <degree> <adjective~> | <adjective~> and <adjective~>
    | <not> <adjective!>
not = not | not exactly | not really | hardly
real = real | true | complete
feeling~ = <felt~> | really <felt~> | truly <felt~> | did not <feel!>
object = the <aspect.one> | the <aspect.many> | it
neutral = it was filmed in <place> | it runs for about <number> hours | the story is set in <place>
    | a <role> wrote the script | we sat in the <row> row | it is based on a <source> | my <relative> came along
    | it came out in <season> | I saw it with my <relative> | it reminded me of <film> | the cinema was half full
    | it begins in <place> and ends in <place>
aspect.one = acting | plot | music | pacing | dialogue | script | ending | direction | story | camerawork | editing
    | score | lighting | humour | cast | soundtrack | scenery | opening | romance | mystery | narration | atmosphere
aspect.many = performances | songs | effects | characters | costumes | jokes | visuals | locations | twists | sets
    | actors | monologues | chases | settings
relative = brother | sister | mother | father | cousin | daughter | son | neighbour | wife | husband
reader = anyone | everyone | a friend | my <relative> | children | students
role = teacher | painter | student | sailor | composer | doctor | journalist | carpenter
place = Norway | Lisbon | Canada | Kenya | Naples | Chile | Berlin | Osaka | Iceland | Mumbai | Dublin | Texas
number = two | three | four | five
row = first | second | third | last | back
source = novel | diary | comic | play | legend | song
season = spring | summer | autumn | winter | March | October
"""

# One line per level of strength: the strength, then good words of it, then bad words of it.
_ADJECTIVES = (
    (1.0, "superb brilliant magnificent stunning", "dreadful terrible horrible ghastly"),
    (0.8, "gripping delightful thrilling beautiful", "tedious boring lifeless painful"),
    (0.7, "moving charming clever witty", "dull clumsy tiresome sloppy"),
    (0.6, "lively stylish touching memorable", "lazy shallow confusing forgettable"),
    (0.5, "good fresh pleasant graceful", "weak silly bland predictable"),
    (0.3, "decent solid likeable", "flat slow mediocre"),
)
_NOUNS = ((1.0, "masterpiece triumph", "disaster disgrace"), (0.8, "joy treat gem", "chore mess waste"))
_ADVICE = ((0.8, "recommend", "forbid"), (0.6, "suggest", "deny"))
# Inflected words: base form, then the form used after a singular subject (verbs) or in the past (feelings).
_VERBS = (
    (0.9, "dazzle:dazzles soar:soars", "collapse:collapses fail:fails"),
    (0.8, "shine:shines delight:delights", "bore:bores disappoint:disappoints"),
    (0.7, "sparkle:sparkles impress:impresses", "drag:drags stumble:stumbles"),
)
_FEELINGS = (
    (1.0, "adore:adored", "loathe:loathed"),
    (0.9, "love:loved", "hate:hated"),
    (0.7, "enjoy:enjoyed", "resent:resented"),
    (0.5, "like:liked", "dislike:disliked"),
)

DEGREES: Mapping[str, float] = {
    "remarkably": 1.4, "truly": 1.3, "deeply": 1.3, "very": 1.25, "really": 1.2,
    "quite": 0.9, "rather": 0.8, "fairly": 0.7, "somewhat": 0.6, "mildly": 0.5,
}  # fmt: skip
"""Factor of a word of degree for the next word's strength."""

NEGATIONS = frozenset({"not", "never", "hardly"})

Levels = tuple[tuple[float, str, str], ...]


class Grammar:
    """The rules with both tones written out, and the lexicon: word -> (strength with its sign, base form)."""

    def __init__(self) -> None:
        self.lexicon: dict[str, tuple[float, str]] = {}
        self.rules: dict[str, tuple[tuple[str, ...], ...]] = {}
        for name, alternatives in _parsed(RULES_TEXT):
            for tone, opposite in (("+", "-"), ("-", "+")) if name.endswith("~") else (("", ""),):
                written = [a.replace("~>", f"{tone}>").replace("!>", f"{opposite}>") for a in alternatives]
                self._add(name.replace("~", tone), written)
        self._add("degree", DEGREES)
        for name, base_name, levels in (
            ("adjective", "adjective", _ADJECTIVES),
            ("noun", "noun", _NOUNS),
            ("advice", "advice", _ADVICE),
            ("verb.one", "verb.many", _VERBS),
            ("felt", "feel", _FEELINGS),
        ):
            self._add_opinions(name, base_name, levels)
        for name in ("clause+", "clause-", "neutral"):
            capitalised = [" ".join(a)[0].upper() + " ".join(a)[1:] for a in self.rules[name]]
            self._add(name.capitalize(), capitalised)

    def _add(self, name: str, alternatives: Iterable[str]) -> None:
        self.rules[name] = tuple(tuple(alternative.split()) for alternative in alternatives)

    def _add_opinions(self, name: str, base_name: str, levels: Levels) -> None:
        for column, tone, sign in ((1, "+", 1.0), (2, "-", -1.0)):
            base_forms, forms = [], []
            for level in levels:
                for entry in str(level[column]).split():
                    base, _, inflected = entry.partition(":")
                    base_forms.append(base)
                    forms.append(inflected or base)
                    self.lexicon[base] = self.lexicon[inflected or base] = (sign * level[0], base)
            self._add(base_name + tone, base_forms)
            self._add(name + tone, forms)

    def write(self, name: str, rng: random.Random, *, used: set[str]) -> list[str]:
        """Draw words by the rule `name`. Avoid base forms in `used` while others are left, and add the drawn ones."""
        words: list[str] = []
        pending = [f"<{name}>"]
        while pending:
            symbol = pending.pop()
            if symbol[0] != "<":
                words.append(symbol)
                continue
            alternatives = self.rules[symbol[1:-1]]
            if alternatives[0][0] in self.lexicon:
                alternatives = tuple(a for a in alternatives if self.lexicon[a[0]][1] not in used) or alternatives
            chosen = alternatives[int(rng.random() * len(alternatives))]
            if chosen[0] in self.lexicon:
                used.add(self.lexicon[chosen[0]][1])
            pending.extend(reversed(chosen))
        return words

    def pairs(self) -> frozenset[tuple[str, str]]:
        """Return exactly the pairs of words that can be neighbours: last words of a symbol x first of the next."""
        first, last = self._edges(0), self._edges(-1)
        found: set[tuple[str, str]] = set()
        for alternatives in self.rules.values():
            for alternative in alternatives:
                for left, right in pairwise(alternative):
                    lefts = last[left[1:-1]] if left[0] == "<" else {left}
                    rights = first[right[1:-1]] if right[0] == "<" else {right}
                    found.update((a, b) for a in lefts for b in rights)
        return frozenset(found)

    def _edges(self, index: int) -> dict[str, set[str]]:
        """Return by rule the words that it can begin (index 0) or end (index -1) with; grow the sets until complete."""
        edges: dict[str, set[str]] = {name: set() for name in self.rules}
        changed = True
        while changed:
            changed = False
            for name, alternatives in self.rules.items():
                before = len(edges[name])
                for alternative in alternatives:
                    symbol = alternative[index]
                    edges[name] |= edges[symbol[1:-1]] if symbol[0] == "<" else {symbol}
                changed |= len(edges[name]) > before
        return edges


def _parsed(text: str) -> list[tuple[str, list[str]]]:
    joined = text.replace("\n    |", " |")
    rules = [line.split(" = ", 1) for line in joined.splitlines() if line.strip()]
    return [(name, [alternative.strip() for alternative in body.split(" | ")]) for name, body in rules]


@cache
def grammar() -> Grammar:
    return Grammar()


@cache
def possible_pairs() -> frozenset[tuple[str, str]]:
    return grammar().pairs()
