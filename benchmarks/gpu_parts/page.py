"""A measurement as a page of the docs: from its JSON to Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

Found = dict[str, Any]
_DEMO = (
    ("demo_steps", "steps of each run"),
    ("demo_recoveries", "recoveries from SIGKILL of a rank"),
    ("demo_differing_losses", "steps with another loss than the undisturbed run, bit by bit"),
    ("demo_runs_not_exact", "runs whose audit is not exact"),
    ("demo_recovery_s", "from the kill to the first new step"),
)
_LOADING = (
    ("loading_parameters", "parameters of the model"),
    ("loading_step_ms", "step"),
    ("loading_batches_differing", "batches that differ between the two ways"),
    ("copied_over_plain", "step with `loader(device=...)` / with `.to(device)`"),
    ("plain_over_plain", "the same side against itself (A/A)"),
    ("plain_over_plain_spread", "interquartile range of that"),
    ("data_share_of_step", "share of the step beyond one with a batch that is on the device already"),
    ("host_waits_for_batch", "share of the step in which the host asks for a batch"),
)
_MEMORY = (
    ("kills", "kills"),
    ("rank_restart_s", "from the kill of a rank to the next step, median"),
    ("rank_recovery_s", "from that kill to the first new step, median"),
    ("node_recovery_s", "from the kill of all ranks to the first new step, median"),
    ("load_s", "loading of the state, median"),
    ("first_step_s", "first step, median"),
    ("from_memory", "resumed from memory"),
    ("replayed", "batches repeated, at the most"),
    ("losses_differing", "losses that differ from those of an undisturbed run"),
    ("losses_compared", "losses compared"),
    ("exact", "audit exact"),
    ("overhead", "states, as a share of the time of the undisturbed run"),
    ("at_risk_s", "longest time between two states, in that run"),
    ("step_s", "a step, undisturbed"),
    ("state_s", "a state"),
)
_OF_SEVERAL = ("node_recovery_s",)
"""Figures that say no more than others if there is one rank."""
_CHECKPOINTS = (
    ("checkpoint_parameters", "parameters of the model"),
    ("checkpoint_bytes", "bytes of a checkpoint"),
    ("checkpoint_stall_s", "training waits per checkpoint"),
    ("checkpoint_stall_alone", "the same, as a share of a block without a checkpoint"),
    ("checkpoint_with_over_without", "block with a checkpoint / without"),
    ("checkpoint_throughput", "throughput with one checkpoint per block / without"),
    ("checkpoint_without_over_without_low", "block without / the one before (A/A), lowest"),
    ("checkpoint_without_over_without_high", "block without / the one before (A/A), highest"),
    ("checkpoint_committed_within_s", "longest time until a checkpoint was committed"),
)


def page_of(found: Found) -> str:
    """Return the page."""
    node, figures = found["machine"], found["figures"]
    lines = [
        "# On an accelerator",
        "",
        "Written by `python -m benchmarks.gpu --docs gpu.json`. `make gpu` measures the machine on which it is called, in at",
        "most 40 minutes, and writes this page.",
        "",
        f"**This one: {_device(node)}**, {node['system']}, PyTorch {node['torch']}, on {found['day']}, in "
        f"{found['minutes']:.0f} minutes, load average {figures['load_average_1min']['value']:.1f}"
        f"{', with `--quick`: the figures show that the program runs, and little else' if found['quick'] else ''}.",
        "",
        *(f"- **{part} failed:** {why}" for part, why in found["failed"].items()),
        *(f"- Not run: {what}." for what in missing(node)),
        "",
        "## The demo, killed",
        "",
        *_demo(found),
        "",
        "## States in memory, killed",
        "",
        *_memory(found),
        "",
        "## Batches of the reader",
        "",
        f"A GPT of {_model(found)}. The sides take turns; each reads alone, its first steps left out.",
        f"Medians of {_value(figures, 'loading_pairs')} pairs, each of {_value(figures, 'loading_steps_of_segment')} steps.",
        "",
        *_table(figures, _LOADING),
        "",
        "## Asynchronous checkpoints",
        "",
        f"A transformer with AdamW, in blocks with and without a checkpoint, {_value(figures, 'checkpoint_pairs')} pairs; "
        f"a block takes {_value(figures, 'checkpoint_block_without_s')}.",
        "",
        *_table(figures, _CHECKPOINTS),
        "",
        "## Nondeterministic kernels",
        "",
        *_kernels(found["kernels"], node["device"]),
        "",
    ]
    return "\n".join(lines)


def missing(node: Found) -> list[str]:
    """Return what this node could not measure."""
    if not node["count"]:
        return [
            "anything on an accelerator, as this machine has none: NCCL, page-locked memory, the copy stream, staging from a "
            "device, and an accelerator's own kernels. All figures are those of the CPU, where both ways of a batch are one"
        ]
    if node["count"] == 1:
        return [f"{node['backend']} between several accelerators, as this machine has one"]
    return []


def _device(node: Found) -> str:
    if not node["count"]:
        return f"no accelerator, `{node['device']}`"
    return f"{node['count']} x {node['name']}, `{node['device']}`"


def _demo(found: Found) -> list[str]:
    node, figures = found["machine"], found["figures"]
    ranks = min(2, node["count"] or 2)
    lines = [
        f"`examples/gpt/train.py` under DeepSpeed, {ranks} {'ranks' if ranks > 1 else 'rank'}, backend {node['backend']}; "
        "a rank is killed after half of the steps.",
        "",
    ]
    for kernels in ("deterministic", "default"):
        named = [(f"{name}_{kernels}", f"{what}, {kernels} kernels") for name, what in _DEMO]
        lines += [line for line in _table(figures, named) if kernels == "deterministic" or not line.startswith(_HEAD)]
    return lines


def _memory(found: Found) -> list[str]:
    lines = [
        "The files of each checkpoint are destroyed once it is committed, so that only memory can restore the state."
    ]
    is_alone = found["machine"]["count"] == 1
    for size in found["sizes"].get("memory", ()):
        named = [(f"memory_{size}_{name}", what) for name, what in _MEMORY if not (is_alone and name in _OF_SEVERAL)]
        if table := _table(found["figures"], named):
            lines += ["", f"A model of {size} parameters:", "", *table]
    return lines


def _model(found: Found) -> str:
    size = found["sizes"]["model"]
    return f"{size['layers']} layers and width {size['d_model']}, {size['batch']} sequences of {size['length']} tokens per step"


def _kernels(kernels: Found, device: str) -> list[str]:
    if not kernels:
        return ["Not found: see above."]
    names = [f"- `{name}`" for name in kernels["kernels"]] or ["- none"]
    differing = kernels["differing_gradients"]
    return [
        f"PyTorch warns of these in a training step of that GPT on `{device}`, under "
        "`torch.use_deterministic_algorithms(True, warn_only=True)`:",
        "",
        *names,
        "",
        f"Of {kernels['parameters']} parameters {len(differing)} have another gradient when the step is repeated"
        f"{': ' + ', '.join(differing[:8]) if differing else ''}.",
    ]


_HEAD = ("| figure", "|---")


def _table(figures: Found, named: Iterable[tuple[str, str]]) -> list[str]:
    rows = [
        (what, _value(figures, name), "" if figures[name]["bar"] is None else _bar(figures[name]))
        for name, what in named
        if name in figures
    ]
    if not rows:
        return []
    return ["| figure | value | bar |", "|---|---|---|", *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _bar(figure: Found) -> str:
    return figure["bar"] if figure["holds"] else f"{figure['bar']}, **missed**"


def _value(figures: Found, name: str) -> str:
    if name not in figures:
        return "?"
    value, unit = figures[name]["value"], figures[name]["unit"]
    number = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    if unit.startswith("%"):
        return f"{number} %"
    return f"{number} {unit}" if unit in ("s", "ms", "bytes") else number
