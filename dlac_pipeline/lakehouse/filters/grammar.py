"""From the text of a filter to its syntax tree: comparisons of a column with literals under NOT, AND and OR."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from typing import NoReturn

from dlac_pipeline.lakehouse.errors import SpecInvalid

EXAMPLE = "\"length > 10 AND lang = 'en'\""
Value = Decimal | str | bytes | bool
_TOKEN = re.compile(
    r"""(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w$]))
    |   (?P<hex>[xX]'(?:[0-9a-fA-F]{2})*')
    |   (?P<text>'(?:[^']|'')*')
    |   (?P<quoted>"(?:[^"]|"")+")
    |   (?P<word>[^\W\d][\w$]*)
    |   (?P<sign><=|>=|<>|!=|==|[=<>(),.])""",
    re.VERBOSE,
)
_SPACE = re.compile(r"\s*")
_COMPARISONS = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "=": "=", "==": "=", "!=": "!=", "<>": "!="}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
_TYPED = ("date", "time", "timestamp", "decimal")
"""Words that may precede a quoted literal, as in DATE '2024-01-31'."""
_DEEPEST = 100


@dataclass(frozen=True, slots=True)
class WrittenLiteral:
    """A literal and how the filter's text writes it."""

    value: Value
    text: str


@dataclass(frozen=True, slots=True)
class Atom:
    """A condition on one column: `operator` is a comparison, "in", "like", "null" or "nan".

    `names` are the parts of the column's name between dots. A part in double quotes may contain dots.
    """

    names: tuple[str, ...]
    operator: str
    literals: tuple[WrittenLiteral, ...] = ()


@dataclass(frozen=True, slots=True)
class Truth:
    """The condition `true` or `false`."""

    value: bool


@dataclass(frozen=True, slots=True)
class Negation:
    """NOT of a condition."""

    of: Syntax


@dataclass(frozen=True, slots=True)
class Junction:
    """AND or OR of two or more conditions."""

    every: bool
    parts: tuple[Syntax, ...]


Syntax = Atom | Truth | Negation | Junction


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int

    @property
    def word(self) -> str:
        """The keyword that the token may be, in lower case."""
        return self.text.lower() if self.kind in ("word", "sign") else ""


def parse_syntax(text: str) -> Syntax:
    """Return the syntax tree of a filter.

    Raises:
        SpecInvalid: the text is not a filter.
    """
    return _Parser(text).parse()


class _Parser:
    """A recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._next = 0
        self._depth = 0

    def parse(self) -> Syntax:
        """Return the tree of the whole text."""
        found = self._junction("or")
        if self._peek().kind != "end":
            self._refuse()
        return found

    def _split(self) -> list[_Token]:
        tokens, at = [], 0
        while (at := self._past_space(at)) < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                self._refuse(at)
            tokens.append(_Token(match.lastgroup or "", match.group(), at))
            at = match.end()
        return [*tokens, _Token("end", "", len(self._text))]

    def _past_space(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return at if match is None else match.end()

    def _peek(self, ahead: int = 0) -> _Token:
        return self._tokens[min(self._next + ahead, len(self._tokens) - 1)]

    def _take(self) -> _Token:
        token = self._peek()
        self._next += 1
        return token

    def _took(self, *words: str) -> bool:
        """Take these words if they come next."""
        if any(self._peek(ahead).word != word for ahead, word in enumerate(words)):
            return False
        self._next += len(words)
        return True

    def _want(self, word: str) -> None:
        if not self._took(word):
            self._refuse()

    def _refuse(self, at: int | None = None, *, hint: str = "") -> NoReturn:
        at = self._peek().at if at is None else at
        rest = repr(self._text[at:]) if self._text[at:] else "its end"
        raise SpecInvalid(
            f"expected a filter such as {EXAMPLE}, found {self._text!r}, which makes no sense from position {at} on: {rest}{hint}"
        )

    def _junction(self, word: str) -> Syntax:
        operand: Callable[[], Syntax] = self._negation if word == "and" else lambda: self._junction("and")
        parts = [operand()]
        while self._took(word):
            parts.append(operand())
        return parts[0] if len(parts) == 1 else Junction(word == "and", tuple(parts))

    def _negation(self) -> Syntax:
        negated = False
        while self._took("not"):
            negated = not negated
        found = self._primary()
        return Negation(found) if negated else found

    def _primary(self) -> Syntax:
        if self._took("("):
            self._depth += 1
            if self._depth > _DEEPEST:
                self._refuse(hint=f"; parentheses nest at most {_DEEPEST} deep")
            found = self._junction("or")
            self._want(")")
            self._depth -= 1
            return found
        truth = self._peek().word in ("true", "false") and self._peek(1).word not in _COMPARISONS
        if truth:
            return Truth(self._take().word == "true")
        return self._mirrored() if self._at_literal() else self._condition()

    def _mirrored(self) -> Atom:
        """A comparison whose literal comes first."""
        literal, operator = self._literal(), self._comparison()
        return Atom(self._column(), _MIRRORED[operator], (literal,))

    def _condition(self) -> Syntax:
        names = self._column()
        if self._took("is"):
            negated = self._took("not")
            word = self._peek().word
            if word not in ("null", "nan"):
                self._refuse()
            self._next += 1
            found: Syntax | None = Atom(names, word)
        else:
            negated = self._took("not")
            found = self._in_like_between(names)
        if found is not None:
            return Negation(found) if negated else found
        if negated:
            self._refuse()
        return Atom(names, self._comparison(), (self._literal(),))

    def _in_like_between(self, names: tuple[str, ...]) -> Syntax | None:
        if self._took("in"):
            return Atom(names, "in", self._literals())
        if self._took("like"):
            pattern = self._literal()
            return Atom(names, "like", (pattern,))
        if self._took("between"):
            low = self._literal()
            self._want("and")
            return Junction(True, (Atom(names, ">=", (low,)), Atom(names, "<=", (self._literal(),))))
        return None

    def _literals(self) -> tuple[WrittenLiteral, ...]:
        self._want("(")
        found = [self._literal()]
        while self._took(","):
            found.append(self._literal())
        self._want(")")
        return tuple(found)

    def _comparison(self) -> str:
        operator = _COMPARISONS.get(self._peek().word)
        if operator is None:
            self._refuse()
        self._next += 1
        return operator

    def _column(self) -> tuple[str, ...]:
        names = [self._name()]
        while self._took("."):
            names.append(self._name())
        return tuple(names)

    def _name(self) -> str:
        token = self._peek()
        if token.kind not in ("word", "quoted") or token.word in ("not", "true", "false"):
            self._refuse()
        self._next += 1
        return token.text[1:-1].replace('""', '"') if token.kind == "quoted" else token.text

    def _at_literal(self) -> bool:
        token = self._peek()
        typed = token.word in _TYPED and self._peek(1).kind == "text"
        return typed or token.kind in ("number", "hex", "text") or token.word in ("true", "false")

    def _literal(self) -> WrittenLiteral:
        if not self._at_literal():
            null = "; compare with NULL by IS NULL or IS NOT NULL" if self._peek().word == "null" else ""
            named = self._peek().kind in ("word", "quoted")
            self._refuse(hint=null or ("; a column is compared with literals, text in single quotes" if named else ""))
        token = self._take()
        if token.word in _TYPED:
            token = self._take()
        if token.kind == "text":
            return WrittenLiteral(token.text[1:-1].replace("''", "'"), token.text)
        if token.kind == "hex":
            return WrittenLiteral(bytes.fromhex(token.text[2:-1]), token.text)
        if token.kind == "word":
            return WrittenLiteral(token.word == "true", token.text)
        try:
            return WrittenLiteral(Decimal(token.text), token.text)
        except DecimalException:
            self._refuse(token.at, hint="; its exponent is out of range")
