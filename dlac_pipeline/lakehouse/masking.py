"""Secrets in text that goes to terminals, logs, reports and Dagster: each becomes ***.

The net is wide: a harmless value that looks like a secret is masked as well. Values of secrets that this process knows, from
its settings and its environment, are masked wherever they are.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote, unquote

MASK = "***"
_WORD = re.compile(
    r"(?:^|[^a-z])(?:pass|pass(?:word|wd|phrase|code)|pwd|secrets?|token|credentials?|auth|authorization|"
    r"(?:api|access|account|private|shared|encryption|signing|master|storage|sas|ssh)[-_. ]?key|signature|sig|sas|jwt|bearer|"
    r"assertion|cookie|session[-_.]?id|otp|dsn|connection[-_.]?string)(?![a-z])"
)
_GLUED = re.compile(
    r"password|passwd|secret|api[-_.]?key|access[-_.]?key|private[-_.]?key|credential|signature|authorization"
)
"""Words that make a secret's name also in the middle of a word, as in PGPASSWORD."""
_HARMLESS = re.compile(
    r"(?:^|[^a-z])(?:(?:begin|end|pad|unk|eos|bos|sep|cls|mask)[-_.]token|"
    r"(?:secret|token|password|key)[-_. ]?(?:name|file|path|ref))$"
)
"""Tokens of a tokenizer, and the place of a secret."""
_IN_QUERY = ("key", "code", "hmac", "ticket")
"""Further names of secrets, in the query of an address only."""
_PROSE = re.compile(
    r"an?|expected|field|found|in|input|is|it|missing|must|none?|not|of|should|string|the|unknown|value|was",
    re.IGNORECASE,
)
"""Words that follow the name of a setting and a colon in messages."""

_USERINFO = re.compile(r"(?P<before>://[^:/@\s'\"]*):(?:\S*@|(?!\d+\b)[^\n'\"]*?@)")
_TOKEN_USER = re.compile(r"(?P<before>https?://)[^:/@\s'\"]{20,}@", re.IGNORECASE)
_BARE_USERINFO = re.compile(r"(?P<before>(?<![\w:/.+%-])[\w.+%-]+):(?!//)[^\s:/@'\"]+@(?!\d+(?![\w:]|\.\w))(?=[\w\[])")
"""An address without its scheme. A number after the @ is a position or a version, as in table:rows@5."""
_END = r"['\")\]}>,;:.]+(?:\s|$)"
_QUERY = re.compile(rf"(?P<before>[?&;#](?P<name>[^?&;#=\s'\"]+)=)(?P<value>(?:(?!{_END})[^&#\s])*)")
_PAIR = re.compile(
    r"(?P<before>(?<![?&;#\w.%])(?<![\w.%]-)(?P<name>[A-Za-z_][\w.-]*)(?P<close>\\?['\"])?\s*(?P<sign>[=:])\s*)"
)
_VALUE = re.compile(
    r"(?P<quote>['\"])(?:\\.|(?!(?P=quote))[^\\])*(?P=quote)|(?P<escaped>\\['\"])(?:(?!(?P=escaped)).)*(?P=escaped)"
    rf"|(?P<bare>(?:(?!{_END})\S)+)",
    re.DOTALL,
)
_FOLDER_VALUE = re.compile(rf"(?P<bare>(?:(?!{_END})[^\s/])+)")
"""The value in a folder's name such as token=abc, as Hive partitions have it: what follows in the path is shown."""
_OPTION = re.compile(r"(?P<before>(?<!\S)--?(?P<name>[A-Za-z][\w.-]*)\s+)(?P<value>(?!-)\S+)")
_HEADER = re.compile(
    r"(?P<before>\b(?:Bearer|Basic|Negotiate|Digest|ApiKey|AWS4-HMAC-SHA256)\s+)(?=\S*[\d=._-])[^\s'\",]{6,}",
    re.IGNORECASE,
)
_KNOWN = re.compile(
    r"\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bhf_\w{20,}"
    r"|\bxox[abposr]-[\w-]{10,}|\bsk-[\w-]{20,}|\bAIza[\w-]{30,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.DOTALL,
)
"""Forms by which secrets are known without a name."""
_CODE = re.compile(r"^[ \t|]*File \"[^\"\n]+\", line \d+.*\n(?P<code>.+)", re.MULTILINE)
"""A line of code in a traceback."""
_LITERAL = re.compile(r"(?P<quote>['\"])(?:\\.|(?!(?P=quote))[^\\\n])*(?P=quote)")
_PLACEHOLDER = re.compile(r"(\{[^{}]*\})")
_PASSWORD = re.compile(r"://[^:/@\s'\"]*:(\S+)@")
_RENDEZVOUS_KEY = "DLAC_RENDEZVOUS_KEY"
_LEAST = 6
"""Characters of a value that is masked wherever it is. Harmless text would have a shorter one."""
_SURE = 12
"""Characters of a value that is masked also between letters, and of one that is masked without the name of a secret."""
KNOWN_VALUES: set[str] = set()
"""Values of secrets in the settings that this process has read."""


@lru_cache(4096)
def is_secret_name(name: str) -> bool:
    """Return whether a setting, header, parameter or variable of this name holds a secret."""
    plain = unquote(unquote(name)).strip()
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower()
    return not _HARMLESS.search(plain) and bool(_WORD.search(plain) or _GLUED.search(plain))


def note_secrets(value: Any, name: str = "", *, private: bool = False) -> None:
    """Have the values of secrets in a setting masked from now on: those with the name of a secret, and passwords of addresses.

    With `private`, as for variables of ranks, long values of letters and digits are secrets under any name.
    """
    if isinstance(value, Mapping):
        for each, inner in value.items():
            note_secrets(inner, str(each), private=private or each == "env")
    elif isinstance(value, list | tuple):
        for inner in value:
            note_secrets(inner, name, private=private)
    elif isinstance(value, str):
        is_mixed = bool(re.search("[A-Za-z]", value) and re.search("[0-9]", value)) and not re.search(r"[/\s]", value)
        if is_secret_name(name) or (private and is_mixed and len(value) >= _SURE):
            KNOWN_VALUES.add(value)
        KNOWN_VALUES.update(_PASSWORD.findall(value))


def mask_known(text: str) -> str:
    """Return the text with *** for the values of secrets that this process knows, and for forms of secrets."""
    # Another thread may set and remove variables meanwhile, as the start of ranks does.
    named = (os.environ.get(name, "") for name in list(os.environ) if name == _RENDEZVOUS_KEY or is_secret_name(name))
    found = {*KNOWN_VALUES, *(value for value in named if not (value.startswith("/") and os.path.exists(value)))}
    values = frozenset(value for value in found if len(value) >= _LEAST and MASK not in value and not _is_word(value))
    return _KNOWN.sub(MASK, _pattern_of(values).sub(MASK, text) if values else text)


def mask_event(text: str) -> str:
    """Return an event, which is JSON, with *** in its texts as of `mask_known`. Names and numbers stay: programs read them."""
    if mask_known(text) == text:
        return text
    event = json.loads(text)
    return json.dumps({name: value if name == "event" else _mask_texts(value) for name, value in event.items()})


def _mask_texts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _mask_texts(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mask_texts(inner) for inner in value]
    return mask_known(value) if isinstance(value, str) else value


def _is_word(value: str) -> bool:
    """Return whether a value is a word such as secret or password, which settings and messages have for other reasons."""
    return len(value) < _SURE and value.isalpha() and is_secret_name(value)


@lru_cache(8)
def _pattern_of(values: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern of values as they are, quoted, and in addresses. Longer ones come first."""
    forms = {form for each in values for form in (each, repr(each)[1:-1], json.dumps(each)[1:-1], quote(each, safe=""))}
    forms |= {unquote(each) for each in values if len(unquote(each)) >= _LEAST}
    sure = [
        re.escape(form) if len(form) >= _SURE else rf"(?<![A-Za-z0-9]){re.escape(form)}(?![A-Za-z0-9])"
        for form in forms
    ]
    return re.compile("|".join(sorted(sure, key=len, reverse=True)))


def mask_secrets(text: str) -> str:
    """Return the text with *** for each password, token or other secret. Of code in a traceback only literals are masked."""
    text = mask_known(text)
    shown, at = [], 0
    for found in _CODE.finditer(text):
        shown += [_mask_text(text[at : found.start("code")]), _mask_code(found["code"])]
        at = found.end()
    return "".join([*shown, _mask_text(text[at:])])


def _mask_code(code: str) -> str:
    """Mask secrets in the literals of a line of code, but for placeholders."""

    def mask(found: re.Match[str]) -> str:
        return "".join(
            _mask_text(each) if at % 2 == 0 else each for at, each in enumerate(_PLACEHOLDER.split(found[0]))
        )

    return _LITERAL.sub(mask, _mask_pairs(code, quoted=True))


def _mask_text(text: str) -> str:
    text = _USERINFO.sub(rf"\g<before>:{MASK}@", text)
    text = _TOKEN_USER.sub(rf"\g<before>{MASK}@", text)
    text = _BARE_USERINFO.sub(rf"\g<before>:{MASK}@", text)
    text = _QUERY.sub(partial(_mask_named, more=_IN_QUERY), text)
    text = _HEADER.sub(rf"\g<before>{MASK}", text)
    text = _mask_pairs(text)
    return _OPTION.sub(_mask_named, text)


def mask_setting(name: str, value: Any) -> Any:
    """Return a setting as it may be shown, with the settings inside of it."""
    if isinstance(value, Mapping):
        return {each: mask_setting(str(each), inner) for each, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_setting(name, inner) for inner in value]
    if value not in (None, "") and not isinstance(value, bool) and is_secret_name(name):
        return MASK
    return mask_secrets(value) if isinstance(value, str) else value


def _mask_named(found: re.Match[str], *, more: Collection[str] = ()) -> str:
    is_secret = is_secret_name(found["name"]) or unquote(unquote(found["name"])).casefold() in more
    return found["before"] + (MASK if is_secret and found["value"] else found["value"])


def _mask_pairs(text: str, *, quoted: bool = False) -> str:
    """Mask values in name=value, 'name': 'value' and headers. Values of harmless names are searched as well.

    With `quoted`, only values in quotes without placeholders.
    """
    shown, at = [], 0
    for pair in _PAIR.finditer(text):
        if pair.start() < at or not is_secret_name(pair["name"]):
            continue
        in_path = pair["sign"] == "=" and text.endswith("/", 0, pair.start())
        value = (in_path and _FOLDER_VALUE.match(text, pair.end())) or _VALUE.match(text, pair.end())
        if quoted and (value is None or value.lastgroup == "bare" or "{" in value[0]):
            continue
        if value and _is_pair(pair, value[0] if value.lastgroup == "bare" else None):
            quote = "" if value.lastgroup == "bare" else value[value.lastgroup or 0]
            shown += [text[at : pair.end()], quote, MASK, quote]
            at = value.end()
    return "".join([*shown, text[at:]])


def _is_pair(pair: re.Match[str], bare: str | None) -> bool:
    """Return True if a value follows a name. In prose a colon only separates, and a secret may be the next word."""
    if bare is not None and bare.casefold() in ("bearer", "basic", "negotiate", "digest", "apikey"):
        return False
    if pair["sign"] == "=" or pair["close"] is not None or bare is None:
        return True
    name = pair["name"].casefold()
    is_user = bare.startswith(f"{MASK}@")  # of an address, whose host is shown
    return ("-" in name or bool(_GLUED.search(name))) and not is_user and not _PROSE.fullmatch(bare)
