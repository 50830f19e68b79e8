"""Secrets are masked in all output."""

import json
import os
import re
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlac_pipeline.extensions.clusters.packed_request import REQUEST_VARIABLE, unpack
from dlac_pipeline.lakehouse import masking
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.masking import is_secret_name, mask_known, mask_secrets, mask_setting
from dlac_pipeline.launchers.protocol import render_job
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.ranks.rank_events import EventReader, EventWriter
from tests.small_records import raw_spec, small_spec

SECRET = "Hunter2Hunter2"
NAMES = [
    *("password", "passwd", "pwd", "passphrase", "PGPASSWORD", "sslpassword", "secret", "credential", "credentials"),
    *("token", "auth_token", "access_token", "accessToken", "refresh_token", "HF_TOKEN", "jwt", "bearer", "Cookie"),
    *("apikey", "api_key", "api-key", "x-api-key", "X-API-Key", "WANDB_API_KEY", "private_key", "AZURE_STORAGE_KEY"),
    *("X-Amz-Signature", "X-Amz-Credential", "X-Amz-Security-Token", "X-Goog-Signature", "sig", "signature", "dsn"),
    *("AWSAccessKeyId", "AWS_SECRET_ACCESS_KEY", "Authorization", "auth", "client_secret", "clientSecret"),
    *("s3.secret-access-key", "s3.session-token", "s3.access-key-id", "adls.account-key", "adls.sas-token"),
    *("gcs.oauth2.token", "header.Authorization", "gcp.bigquery.credentials-info"),
]
HARMLESS = [
    *("begin_token", "end_token", "pad_token", "tokens", "tokenizer", "n_tokens", "key_groups", "keys", "compass"),
    *("author", "design", "pin", "s3.endpoint", "secretName", "password_file", "namespace"),
]
USABLE = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=8, max_size=30).map("Zq9".__add__)
URL_SECRETS = st.text(min_size=1, max_size=30).map(lambda text: "Zq9" + quote(text, safe=""))


@pytest.mark.parametrize("name", NAMES)
def test_secret_names_are_known(name: str) -> None:
    """Names in settings, headers, variables and parameters are recognized in any spelling."""
    assert is_secret_name(name)
    assert is_secret_name(quote(name, safe="").replace("_", "%5F"))


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_names_stay(name: str) -> None:
    """Values that people need are shown."""
    assert not is_secret_name(name)
    assert mask_secrets(f"expected {name}=12, found {name} = 'x' and {name}: y") == (
        f"expected {name}=12, found {name} = 'x' and {name}: y"
    )


@given(st.sampled_from(NAMES), USABLE, st.sampled_from(["", "more text", "&b=2", "#x", "' in y", ", and"]))
def test_named_secrets_are_masked(name: str, secret: str, tail: str) -> None:
    """Secrets in queries, quotes, JSON, variables and options are masked."""
    for form in [
        *(f"https://h/x?a=1&{name}={secret}{tail}", f"s3://b/x?{name}={secret}{tail}", f"?{name}={secret}{tail}"),
        *(f"found '{name}': '{secret}'{tail}", f"{name}={secret} {tail}", f"{name} = '{secret}' {tail}"),
        *(json.dumps({name: secret}), json.dumps(json.dumps({name: secret})), repr({name: secret})),
        *(f"--{name} {secret} {tail}", f"--{name}={secret} {tail}"),
    ]:
        shown = mask_secrets(form)
        assert secret not in shown, form
        assert mask_secrets(shown) == shown


@given(
    URL_SECRETS, st.sampled_from(["", "me", "me%40corp"]), st.sampled_from(["postgresql+psycopg2", "https", "redis"])
)
def test_passwords_of_addresses_are_masked(secret: str, user: str, scheme: str) -> None:
    """Node and path stay readable."""
    shown = mask_secrets(f"expected {scheme}://{user}:{secret}@db:5432/lake to answer")
    assert secret not in shown
    assert shown == f"expected {scheme}://{user}:***@db:5432/lake to answer"


@pytest.mark.parametrize(
    "text",
    [
        *(f"https://me:a@{SECRET}@h/x", f"AWS_SECRET_ACCESS_KEY={SECRET}/{SECRET}"),
        *(f"postgres://u:pa {SECRET}@h/d", f"?api%255Fkey={SECRET}"),
        *(f"AccountName=x;AccountKey={SECRET}==;EndpointSuffix=core", f'{{"password": "a\\"{SECRET}"}}'),
        *(f"me:{SECRET}@10.0.0.1/x", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ" + SECRET + ".sig"),
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_odd_secrets_are_masked(text: str) -> None:
    """Rare forms, which a narrow pattern would miss, are masked."""
    assert SECRET not in mask_secrets(text)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("expected host:port at 10.0.0.1:80, found 'x'", ""),
        ("sequences.begin_token: Input should be a valid string", ""),
        ("git@github.com:x/y", ""),
        ("https://x-access-token:***@github.com/x", ""),
        *(
            (f"{before}/year=2024/token={SECRET}/secret={SECRET}/part-0.parquet", SECRET)
            for before in ("/data", "s3://b/data", "found '/data", "FileNotFoundError: /data")
        ),
    ],
)
def test_messages_stay_readable(text: str, masked: str) -> None:
    """A wide pattern masks no ordinary text. The folder of a Hive partition may be named like a secret: its file stays."""
    assert mask_secrets(text) == (text.replace(masked, "***") if masked else text)


def test_settings_are_masked_by_name() -> None:
    """Sections, lists and numbers are masked too."""
    properties = {"s3.secret-access-key": SECRET}
    shown = mask_setting(
        "", {"env": {"HF_TOKEN": 5, "A": "b"}, "properties": properties, "args": [f"--token={SECRET}"]}
    )
    assert shown["env"] == {"HF_TOKEN": "***", "A": "b"}
    assert (shown["properties"], shown["args"]) == ({"s3.secret-access-key": "***"}, ["--token=***"])


NUMBER = 8675309
BAD_SPECS: list[dict[Any, Any]] = [
    raw_spec(lakehouse={"password": SECRET}),
    raw_spec(lakehouse={"properties": {"s3.secret-access-key": NUMBER}}),
    raw_spec(lakehouse={"properties": SECRET}),
    raw_spec(launch={"termination_url": f"ftp://me:{SECRET}@h"}),
    {**raw_spec(), "password": SECRET},
    raw_spec() | cast(Any, {NUMBER: SECRET}),
]


@pytest.mark.parametrize("raw", BAD_SPECS)
def test_invalid_spec_shows_no_secret(raw: dict[str, Any]) -> None:
    """Neither the message nor its cause, which a traceback shows, has the secret."""
    with pytest.raises(SpecInvalid) as refused:
        parse_spec(raw, origin="the test")
    assert SECRET not in f"{refused.value} {refused.value!r} {refused.value.__cause__} {refused.value.__context__}"
    assert str(NUMBER) not in f"{refused.value} {refused.value!r}"


def test_every_error_is_masked() -> None:
    """The secret is masked in every error and every form of it: text, repr and arguments."""
    err = SpecInvalid(f"expected x at 'https://h?apikey={SECRET}', found y")
    assert SECRET not in f"{err} {err!r} {err.args}"
    config = LakehouseConfig(uri=f"https://me:{SECRET}@h", properties={"s3.session-token": SECRET})
    assert config.address == "https://me:***@h"
    assert SECRET not in repr(config)


@pytest.mark.parametrize("on", ["slurm", "kubernetes"])
def test_rendered_job_is_masked(on: str) -> None:
    """Neither the environment of the job nor its request has the secret."""
    raw = raw_spec(launch={"on": on, "nodes": "2", "env": {"HF_TOKEN": SECRET}})
    raw["lakehouse"] = {
        "warehouse": "s3://b/w",
        "uri": f"postgresql://me:{SECRET}@db/lake",
        "properties": {"s3.secret-access-key": SECRET},
    }
    raw["checkpoint"] = {"store": "s3://b/c", "store_properties": {"s3.session-token": SECRET}}
    pod = {"metadata": {"labels": {"a": "shown"}}}
    raw["cluster"] = {"image": "i", "pod": pod} if on == "kubernetes" else {"options": {"comment": "shown"}}
    job = render_job(Request(spec=parse_spec(raw, origin="the test").resolved(Path("/home/x"))))
    assert "shown" in job
    assert SECRET not in job
    packed = re.search(r"eJ[\w-]{100,}=*", job)
    assert packed is not None
    assert SECRET not in unpack({REQUEST_VARIABLE: packed[0]}).model_dump_json()


def test_known_values_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of settings and variables that hold secrets are masked wherever they are, and in any spelling."""
    monkeypatch.setattr(masking, "KNOWN_VALUES", set())
    monkeypatch.setenv("REGISTRY_TOKEN", "from the environment")
    odd = 'p"\\s/9\nxyz'
    env = {"HF_TOKEN": "short7", "LICENCE": "k3y-without-a-name", "STAGE": "production-of-spring", "DB_PASSWORD": odd}
    properties = {"s3.secret-access-key": "0123456789abcdef"}
    small_spec(launch={"env": env}, lakehouse={"properties": properties})
    LakehouseConfig(uri="postgresql://me:pass%40word@db/lake")
    secrets = [*(value for name, value in env.items() if name != "STAGE"), *properties.values(), "pass@word"]
    for secret in [*secrets, "from the environment"]:
        for form in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret, safe="")):
            assert mask_secrets(f"login with {form}, refused") == "login with ***, refused"
            assert mask_known(f"({form})") == "(***)"
    for text in ("production-of-spring", "shortly7", "short71 steps"):
        assert mask_secrets(text) == text


def test_word_as_password_spoils_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A password such as "secret" is masked beside its name only: settings and messages have the word for other reasons."""
    monkeypatch.setattr(masking, "KNOWN_VALUES", set())
    LakehouseConfig(uri="postgresql://me:secret@db/lake")
    assert mask_secrets("kind: claim, host or secret") == "kind: claim, host or secret"
    assert mask_secrets("postgresql://me:secret@db/lake") == "postgresql://me:***@db/lake"


def test_variables_of_other_threads_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of ranks sets and removes variables while another thread masks a text."""
    looked = os.environ.get

    def remove_first(name: str, default: str = "") -> str | None:
        os.environ.pop("GONE_TOKEN", None)
        return looked(name, default)

    monkeypatch.setenv("A_TOKEN", "value of the first")
    monkeypatch.setenv("GONE_TOKEN", "value of the second")
    monkeypatch.setattr(os.environ, "get", remove_first)
    assert mask_known("value of the first") == "***"


@pytest.mark.parametrize(
    ("code", "is_secret"),
    [
        ('self.client = Client(token = os.environ["TOKEN"])', False),
        ('url = f"https://me:{password}@host/x?sig={signature}"', False),
        (f'login(password="{SECRET}")', True),
        (f'url = f"https://me:{SECRET}@{{host}}"', True),
    ],
)
def test_literals_in_traceback_are_masked(code: str, is_secret: bool) -> None:
    """A line of code stays readable with names of secrets. Secrets in it and in the message are masked."""
    text = f'Traceback:\n  File "/x/train.py", line 7, in main\n    {code}\n           ^^^^^\nKeyError: 1'
    assert SECRET not in mask_secrets(f"{text}\nValueError: password={SECRET}")
    assert is_secret or mask_secrets(text) == text


def test_masked_event_stays_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, names and the rest of an event survive secrets that are equal to them. Texts are masked."""
    monkeypatch.setenv("DB_PASSWORD", "131072")
    monkeypatch.setenv("API_TOKEN", "checkpoint")
    texts = {"message": "login 131072 refused", "log": ["-----BEGIN PRIVATE KEY-----\nMIIE", "checkpoint failed"]}
    EventWriter(tmp_path, 0).write({"event": "checkpoint", "step": 131072, "loss": 0.131072, **texts})
    [event] = EventReader(tmp_path).read_new()
    assert (event["event"], event["step"], event["loss"]) == ("checkpoint", 131072, 0.131072)
    assert (event["message"], event["log"]) == ("login *** refused", ["***", "*** failed"])
