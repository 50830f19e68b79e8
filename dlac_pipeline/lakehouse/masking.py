"""Secrets in text that goes to terminals, logs, reports and Dagster: each becomes ***.

The net is wide: a harmless value that looks like a secret is masked as well.
"""

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

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


def is_secret_name(name: str) -> bool:
    """Return whether a setting, header, parameter or variable of this name holds a secret."""
    plain = unquote(unquote(name)).strip()
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower()
    return not _HARMLESS.search(plain) and bool(_WORD.search(plain) or _GLUED.search(plain))


def mask_secrets(text: str) -> str:
    """Return the text with *** for each password, token or other secret in it."""
    text = _KNOWN.sub(MASK, text)
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
    return found["before"] + (MASK if is_secret else found["value"])


def _mask_pairs(text: str) -> str:
    """Mask values in name=value, 'name': 'value' and headers. Values of harmless names are searched as well."""
    shown, at = [], 0
    for pair in _PAIR.finditer(text):
        if pair.start() < at or not is_secret_name(pair["name"]):
            continue
        in_path = pair["sign"] == "=" and text.endswith("/", 0, pair.start())
        value = (in_path and _FOLDER_VALUE.match(text, pair.end())) or _VALUE.match(text, pair.end())
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
