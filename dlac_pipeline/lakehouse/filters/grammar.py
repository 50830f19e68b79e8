"""Parser of filters: the text becomes a condition, comparisons of a column with literals under NOT, AND and OR.

sqlglot reads the text, in a dialect with the words and signs of filters alone: any other word is the name of a column.
"""

# ruff: noqa: RUF012  sqlglot configures a dialect by class attributes

import re
from collections.abc import Sequence
from decimal import Decimal, DecimalException
from itertools import accumulate

from pyiceberg.schema import Schema
from pyiceberg.types import ListType, MapType, NestedField, StringType, StructType
from sqlglot import exp, parser, tokens
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, TokenError
from sqlglot.tokenizer_core import Token, TokenType

from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid
from dlac_pipeline.lakehouse.filters import conditions
from dlac_pipeline.lakehouse.filters.literals import LiteralPlace, Value, hint_for, place_of

_EXAMPLE = "\"length > 10 AND lang = 'en'\""
_HINT = "compare columns with literals, under NOT, AND and OR"
_WORDS = "AND OR NOT IN LIKE BETWEEN IS NULL TRUE FALSE DATE TIME TIMESTAMP DECIMAL"
_NAME = re.compile(r"[^\W\d][\w$]*")
_COMPARED = (exp.LT, exp.LTE, exp.GT, exp.GTE, exp.EQ, exp.NEQ, exp.In)
_SIGNS: dict[type, str] = dict(zip(_COMPARED, ("<", "<=", ">", ">=", "=", "!=", "="), strict=True))
_OPPOSITE = {"<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
_NAMES = (exp.Column, exp.Dot)
_ONES = (exp.And, exp.Or, exp.Not, exp.Is, exp.Like, exp.Null, exp.Boolean, exp.Literal, exp.RawString, exp.Cast)
_TWOS = (exp.Paren, exp.In, exp.Between, exp.Identifier)
_TOKENS: dict[type, int] = dict.fromkeys((*_SIGNS, *_ONES), 1) | dict.fromkeys(_TWOS, 2)
_TOKENS |= {exp.Column: -1, exp.Dot: 0, exp.DataType: 0}
"""Tokens of each node that a filter may have. An identifier counts the dot after it, and IN the commas between its literals."""
_JOINED = (TokenType.BACKSLASH, TokenType.DOT)
_DEEPEST = 25  # sqlglot takes up to 30 of Python's 1,000 frames for each


class _Filters(Dialect):
    class Tokenizer(tokens.Tokenizer):
        SINGLE_TOKENS = {
            **{sign: tokens.Tokenizer.SINGLE_TOKENS[sign] for sign in "(),.=<>'\""},
            **dict.fromkeys("+-!", TokenType.BACKSLASH),  # without a meaning but in numbers and !=
        }
        KEYWORDS = {
            **{sign: tokens.Tokenizer.KEYWORDS[sign] for sign in ("<=", ">=", "<>", "!=", "==")},
            **{word: TokenType[word] for word in _WORDS.split()},
        }
        RAW_STRINGS = [("x'", "'"), ("X'", "'")]
        COMMENTS = []

    class Parser(parser.Parser):
        FUNCTIONS = {}
        FUNCTION_PARSERS = {}
        NO_PAREN_FUNCTION_PARSERS = {}


def parse_filter(text: str, schema: Schema, *, setting: str = "filter") -> conditions.Condition:
    """Return the condition in `text`, which `setting` has: all rows when it is empty.

    Raises:
        SpecInvalid: it is blank or no filter, or compares a column with an incomparable literal.
        NoSuchColumn: it names a column that the schema lacks.
    """
    if not text:
        return conditions.ALWAYS
    if not text.strip():
        raise SpecInvalid(
            f"expected a filter such as {_EXAMPLE}, found the blank {text!r}: leave it out to select all rows"
        )
    binder = _Binder(text, schema, setting)
    try:
        return binder.bind(binder.parse(), negated=False)
    except TokenError:
        raise binder.refusal(text, "close each quote") from None
    except ParseError as err:
        raise binder.refusal(err.errors[0]["highlight"] + err.errors[0]["end_context"]) from None
    except RecursionError:
        raise binder.refusal(text, "write NOT once instead of many times") from None


class _Binder:
    """The columns of a schema, for the conditions of one text."""

    def __init__(self, text: str, schema: Schema, setting: str) -> None:
        self._text = text
        self._schema = schema
        self._setting = setting

    def refusal(self, part: str | exp.Expr, hint: str = _HINT) -> SpecInvalid:
        part = part if isinstance(part, str) else part.sql(dialect=_Filters)
        return SpecInvalid(
            f"expected a filter such as {_EXAMPLE}, found {self._text!r}, which makes no sense at {part!r}: {hint}"
        )

    def parse(self) -> exp.Expr:
        """Return sqlglot's tree. It has all tokens of the text, and only nodes that filters have."""
        found = self._tokens()
        depths = accumulate({TokenType.L_PAREN: 1, TokenType.R_PAREN: -1}.get(token.token_type, 0) for token in found)
        if max(depths) > _DEEPEST:
            raise self.refusal("(", f"parentheses nest at most {_DEEPEST} deep; a AND b AND c needs none")
        [tree] = _Filters().parser().parse_into(exp.Condition, found, self._text)
        nodes = list(tree.walk()) if tree else []
        for node in nodes:
            if type(node) not in _TOKENS:
                raise self.refusal(node)
        # sqlglot passes over a missing AND of BETWEEN, a missing IS of NULL, and a comma without a literal.
        counts = (_TOKENS[type(node)] + len(node.expressions) + bool(node.args.get("negate")) for node in nodes)
        if tree is None or sum(counts) != len(found):
            raise self.refusal(self._text, "write IN (1, 2), BETWEEN 1 AND 2 and IS NOT NULL in this form")
        return tree

    def _tokens(self) -> list[Token]:
        """Return the tokens of the text. Signs and dots in front of a number are a part of it."""
        found: list[Token] = []
        for token in _Filters().tokenize(self._text):
            number = token.token_type == TokenType.NUMBER
            while number and found and found[-1].token_type in _JOINED and found[-1].end + 1 == token.start:
                token.text, token.start = found[-1].text + token.text, found.pop().start
            found.append(token)
        return found

    def bind(self, node: exp.Expr, *, negated: bool) -> conditions.Condition:
        match node:
            case exp.Paren() | exp.Not():
                return self.bind(node.this, negated=negated != isinstance(node, exp.Not))
            case exp.And() | exp.Or():
                parts = [self.bind(part, negated=negated) for part in node.flatten()]
                return conditions.combine(isinstance(node, exp.And) != negated, parts)
            case exp.Between(this=column, args={"low": low, "high": high}):
                limits = exp.GTE(this=column, expression=low), exp.LTE(this=column, expression=high)
                return conditions.combine(not negated, [self.bind(limit, negated=negated) for limit in limits])
            case exp.Boolean():
                return conditions.NEVER if node.this == negated else conditions.ALWAYS
        return self._atom(node, negated)

    def _atom(self, node: exp.Expr, negated: bool) -> conditions.Condition:
        match node:
            case exp.Is(expression=exp.Null()):
                return conditions.IsNull(self._path(node.this), negated)
            case exp.Is() if node.expression.sql().lower() == "nan":
                return conditions.IsNan(self._path(node.this), negated)
            case exp.Like():
                return self._like(self._path(node.this), node.expression, negated != bool(node.args.get("negate")))
            case _ if type(node) in _SIGNS:
                return self._comparison(node, _SIGNS[type(node)], negated)
        raise self.refusal(node)

    def _comparison(self, node: exp.Expr, operator: str, negated: bool) -> conditions.Condition:
        column, literals = node.this, node.expressions or [node.expression]
        if isinstance(node.expression, _NAMES) and not isinstance(column, _NAMES):
            column, literals, operator = node.expression, [column], _MIRRORED[operator]
        written = [self._literal(each) for each in literals]
        path = self._path(column)
        places = [self._place(path, *each) for each in written]
        if operator in ("=", "!="):
            return conditions.match_members(path, places, negated != (operator == "!="))
        return conditions.compare(path, _OPPOSITE[operator] if negated else operator, places[0])

    def _literal(self, node: exp.Expr) -> tuple[Value, str]:
        """Return the value of a literal, and how the text has it."""
        name = node.name
        try:
            match node:
                case exp.Cast(this=exp.Literal(is_string=True)) | exp.Literal(is_string=True):
                    return name, "'" + name.replace("'", "''") + "'"
                case exp.Literal():
                    return Decimal(name), name
                case exp.RawString():
                    return bytes.fromhex(name), f"X'{name}'"
                case exp.Boolean():
                    return bool(node.this), node.sql().lower()
        except DecimalException:
            raise self.refusal(name, "its exponent is out of range") from None
        except ValueError:
            raise self.refusal(name, "write bytes as pairs of hex digits, as in X'0aff'") from None
        raise self.refusal(node, "compare with literals, text in single quotes, and with NULL by IS NULL")

    def _place(self, path: conditions.FieldPath, value: Value, written: str) -> LiteralPlace:
        place = place_of(path.kind, value)
        if place is None:
            raise self._incomparable(path, value, written, hint_for(path.kind))
        return place

    def _incomparable(self, path: conditions.FieldPath, value: Value, written: str, wanted: str) -> SpecInvalid:
        nan = isinstance(value, str) and value.strip().lower() == "nan"
        return SpecInvalid(
            f"expected column {path.name!r} of type {path.kind} to be compared with {wanted}, found {written} in filter "
            f"{self._text!r}: "
            + ("write IS NAN or IS NOT NAN" if nan else "write it in that form, or name another column")
        )

    def _like(self, path: conditions.FieldPath, node: exp.Expr, negated: bool) -> conditions.Condition:
        pattern, written = self._literal(node)
        if not isinstance(path.kind, StringType):
            raise SpecInvalid(
                f"expected a column of type string before LIKE, found {path.name!r} of type {path.kind} with {written} in "
                f"filter {self._text!r}: name another column, or use a comparison"
            )
        if not isinstance(pattern, str):
            raise self._incomparable(path, pattern, written, "a pattern in single quotes such as 'abc%'")
        return conditions.match_pattern(path, pattern, negated)

    def _path(self, node: exp.Expr) -> conditions.FieldPath:
        """Return the column of this name. A column with dots in its name precedes a field in a struct."""
        parts = node.parts if isinstance(node, _NAMES) else [node]
        for part in parts:
            if not (isinstance(part, exp.Identifier) and part.name and (part.quoted or _NAME.fullmatch(part.name))):
                raise self.refusal(part, "name a column, one that is a word of SQL in double quotes")
        names = tuple(part.name for part in parts)
        fields = _descend(self._schema.fields, names)
        if fields is None:
            known, hint = filter_names(self._schema), _hint_inside(self._schema, names)
            raise NoSuchColumn.of(f"{self._setting} {self._text!r}", ".".join(names), known, hint=hint)
        return conditions.FieldPath(fields)


def filter_names(inside: Schema | StructType, prefix: str = "") -> list[str]:
    """Return the names that a filter may have: of columns, and of fields inside structs, not of what lists and maps hold."""
    found = []
    for field in inside.fields:
        found.append(prefix + field.name)
        if isinstance(field.field_type, StructType):
            found += filter_names(field.field_type, f"{prefix}{field.name}.")
    return found


def _hint_inside(schema: Schema, names: tuple[str, ...]) -> str:
    for count in range(len(names) - 1, 0, -1):
        outer = _descend(schema.fields, names[:count])
        if outer is not None and isinstance(outer[-1].field_type, ListType | MapType):
            name = conditions.FieldPath(outer).name
            kind = "list" if isinstance(outer[-1].field_type, ListType) else "map"
            return f"a filter cannot look into the {kind} {name!r}; write {name} IS NULL or IS NOT NULL, or name another column"
    return ""


def _descend(fields: Sequence[NestedField], names: tuple[str, ...]) -> tuple[NestedField, ...] | None:
    by_name = {each.name: each for each in fields}
    for count in range(len(names), 0, -1):
        found = by_name.get(".".join(names[:count]))
        if found is None:
            continue
        if count == len(names):
            return (found,)
        inside = _descend(found.field_type.fields, names[count:]) if isinstance(found.field_type, StructType) else None
        if inside is not None:
            return (found, *inside)
    return None
