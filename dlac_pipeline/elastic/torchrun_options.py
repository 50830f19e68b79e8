"""torchrun's options and PET_* variables for `dlac train`, as torchrun's parser reads them, as settings of the launch section."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.variables import warn_of_variables
from dlac_pipeline.spec.launch_spec import LaunchSpec

_PREFIX = "PET_"
_IGNORED = frozenset({"training_script", "training_script_args", "node_rank", "rdzv_backend", "role"})
"""Nodes get their places by round, and always meet by DLAC's own rendezvous."""
_MEETING = {"timeout": "gather_timeout_s", "join_timeout": "gather_timeout_s", "last_call_timeout": "last_call_s"}
_MEETING |= {"node_timeout": "node_timeout_s", "key_file": "rendezvous_key_file"}
"""Parameters of --rdzv-conf."""
_ABSENT = object()
_TAKEN = {name: name for name in ("max_restarts", "numa_binding", "virtual_local_rank")}
_TAKEN["shutdown_timeout"] = "deadline_s"
_STARTS = {"fork": "fork", "forkserver": "fork", "spawn": "spawn"}
_SUPPORTED = (
    "--nnodes, --nproc-per-node, --rdzv-endpoint, --rdzv-conf, --rdzv-id, --standalone, --master-addr, --master-port, "
    "--max-restarts, --start-method, --shutdown-timeout, --numa-binding, --virtual-local-rank"
)


def are_given(options: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether there is an option or a variable of torchrun."""
    return bool(options) or any(name.startswith(_PREFIX) for name in environment)


def launch_settings(
    options: Sequence[str], environment: Mapping[str, str], launch: LaunchSpec, run: str
) -> dict[str, Any]:
    """Return the launch settings that options, or else variables, replace. Raise `SpecInvalid` for one without a meaning here."""
    given = _parse(options, environment)
    settings: dict[str, Any] = {}
    if given.pop("standalone", False):
        settings |= {"nodes": "", "rendezvous": ""}
        given = {name: value for name, value in given.items() if not name.startswith(("rdzv", "nnodes"))}
    _take_meeting_point(given, settings, run)
    if "nnodes" in given:
        nodes = str(given.pop("nnodes"))
        settings["nodes"] = "" if nodes in ("1", "1:1") else nodes
    if "nproc_per_node" in given:
        ranks = _ranks_per_node(str(given.pop("nproc_per_node")))
        settings["nproc_per_node" if settings.get("nodes", launch.nodes) else "world_size"] = ranks
    if "start_method" in given:
        settings["start"] = _STARTS[given.pop("start_method")]
    for name in _TAKEN.keys() & given.keys():
        settings[_TAKEN[name]] = given.pop(name)
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise SpecInvalid(
            f"expected options of torchrun that `dlac train` has ({_SUPPORTED}), found {names}, or its PET_ variable: leave it "
            "out. Logs are in the launch folder (`dlac logs RUN`), script and arguments in the job spec"
        )
    return settings


def _parse(options: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the given options by name, without torchrun's defaults."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.exit_on_error = False
    names = vars(parser.parse_args(["script"]))
    variables = {f"{_PREFIX}{name.upper()}" for name in names}
    warn_of_variables([name for name in environment if name.startswith(_PREFIX)], variables, "torchrun")
    absent = {name: _ABSENT for name in names if f"{_PREFIX}{name.upper()}" not in environment}
    parser.set_defaults(**absent)
    try:
        found, unknown = parser.parse_known_args([*options, "script"])
    except (argparse.ArgumentError, SystemExit) as err:
        raise SpecInvalid(f"expected options as torchrun has them, found {list(options)!r}: {err}") from err
    given = {name: value for name, value in vars(found).items() if name not in _IGNORED and value is not _ABSENT}
    if unknown or found.training_script != "script":
        wrong = unknown or [found.training_script]
        raise SpecInvalid(f"expected options of `dlac train` or torchrun, found {wrong!r}: see `dlac train --help`")
    return given


def _take_meeting_point(given: dict[str, Any], settings: dict[str, Any], run: str) -> None:
    endpoint = given.pop("rdzv_endpoint", "")
    address, port = given.pop("master_addr", None), given.pop("master_port", None)
    if not endpoint and address:
        endpoint = f"{address}:{port or 29500}"
    if endpoint:
        has_port = ":" in endpoint.rpartition("]")[2]
        settings["rendezvous"] = endpoint if has_port else f"{endpoint}:29400"  # torchrun's default
    name = given.pop("rdzv_id", run)
    if name != run:
        raise SpecInvalid(
            f"expected --rdzv-id = {run!r}, for nodes meet by the name of the run, found {name!r}: leave the option out"
        )
    for pair in filter(None, str(given.pop("rdzv_conf", "")).split(",")):
        key, _, value = pair.partition("=")
        if key.strip() not in _MEETING:
            raise SpecInvalid(f"expected --rdzv-conf with {', '.join(_MEETING)}, found {key!r}: leave it out")
        settings[_MEETING[key.strip()]] = value.strip()


def _ranks_per_node(value: str) -> int:
    """Return the number of ranks that torchrun's --nproc-per-node stands for on this node."""
    if value.isascii() and value.isdecimal():
        return int(value)
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(value))
    except ValueError as err:
        raise SpecInvalid(
            f"expected --nproc-per-node as a number, auto, cpu, gpu or xpu, found {value!r}: {err}"
        ) from err
