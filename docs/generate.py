"""Generator of the reference pages: `python docs/generate.py`. In: the command and the job spec's schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.cli import get_docs_for_click
from typer.main import get_command

from dlac_pipeline.cli.main import app
from dlac_pipeline.spec.job_spec import JobSpec

PAGES = Path(__file__).parent / "reference"
_INTRODUCTION = """# Settings of a job spec

A job spec is a TOML or YAML file. Editors and other tools can use its JSON schema, [job.schema.json](job.schema.json).
This page is generated from the code.
"""


def pages() -> dict[str, str]:
    """Return the text of each reference page by file name."""
    schema = JobSpec.model_json_schema()
    return {
        "commands.md": "\n".join(_command_lines()) + "\n",
        "settings.md": "\n".join(_setting_lines(schema)) + "\n",
        "job.schema.json": json.dumps(schema, indent=2, sort_keys=True) + "\n",
    }


def main() -> None:
    """Write the pages."""
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text)


def _command_lines() -> Iterator[str]:
    command = get_command(app)
    with command.make_context("dlac", [], resilient_parsing=True) as context:
        text = get_docs_for_click(obj=command, ctx=context, name="dlac", title="Commands")
    for line in text.splitlines():
        yield line.rstrip()


def _setting_lines(schema: dict[str, Any]) -> Iterator[str]:
    yield _INTRODUCTION
    definitions = schema["$defs"]
    sections = {name: _section_of(field, definitions) for name, field in schema["properties"].items()}
    yield "## At the top"
    yield ""
    yield from _table({name: field for name, field in schema["properties"].items() if sections[name] is None}, schema)
    for name, section in sections.items():
        if section is not None:
            yield ""
            yield f"## `[{name}]`"
            yield ""
            if text := schema["properties"][name].get("description", section.get("description", "")):
                yield _one_line(text)
                yield ""
            yield from _table(section["properties"], section)


def _section_of(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of the section that a field is, or None for a plain value."""
    options = [field, *field.get("anyOf", []), *field.get("allOf", [])]
    names = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
    return definitions[names[0]] if names else None


def _table(fields: dict[str, Any], owner: dict[str, Any]) -> Iterator[str]:
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        default = "required" if name in owner.get("required", []) else _default_of(field)
        yield f"| `{name}` | {_type_of(field)} | {default} | {_one_line(field.get('description', ''))} |"


def _default_of(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "" if value in (None, "", [], {}) else f"`{json.dumps(value)}`"


def _type_of(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "$ref" in field:
        return "table"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type_of(option) for option in field["anyOf"] if option.get("type") != "null"))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type_of(field.get('items', {}))}"
    return "table" if kind == "object" else kind


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
