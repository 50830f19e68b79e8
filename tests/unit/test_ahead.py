"""What is imported before ranks are forked: never what the script would have found otherwise, or in another environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dlac_pipeline.ranks.ahead import accelerated, modules_ahead

DLAC = ["dlac_pipeline.worker", "dlac_pipeline.dataset"]


def ahead(folder: Path, script: str, beside: dict[str, str] | None = None, *, accelerated: bool = False) -> list[str]:
    """What is imported ahead for a script and the modules beside it."""
    for name, text in {"script.py": script, **(beside or {})}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return modules_ahead(folder / "script.py", accelerated=accelerated)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "import torch\nimport dlac_pipeline as dlac\nfrom transformers import AutoModel\n",
            ["torch", *DLAC, "transformers"],
        ),
        (
            "'''Doc.'''\nfrom __future__ import annotations\nimport os, torch.nn\nN = 4\nimport deepspeed",
            ["torch", "deepspeed"],
        ),
        ("import os\nos.environ['HF_HOME'] = '/models'\nimport torch\nimport transformers", []),
        ("import torch\nimport os\nos.environ |= {'A': 'b'}\nimport transformers", ["torch"]),
        ("from os import environ\nenviron |= {'A': 'b'}\nimport torch", []),
        ("import torch\nprepare()\nimport transformers", ["torch"]),
        ("import torch\ndef main(n=4):\n    call()\nimport transformers", ["torch", "transformers"]),
        ("@dataclass(frozen=True)\nclass A:\n    n: int = field(default=1)\nimport torch", ["torch"]),
        ("settings = prepared()\nimport torch", []),
        ("if TYPE_CHECKING:\n    import datasets\nimport torch", ["torch"]),
        ("try:\n    import torch\nexcept ImportError:\n    pass\nimport transformers", []),
        ("import torch\nif __name__ == '__main__':\n    import transformers", ["torch"]),
        ("import torch\nimport mpi4py\nimport unheard_of\nimport accelerate", ["torch", "accelerate"]),
        ("import torch\nimport (", []),
    ],
)
def test_it_ends_where_the_script_does_anything_else(tmp_path: Path, script: str, expected: list[str]) -> None:
    """Imports and definitions are passed over; a call or a change of the environment may be meant for what is imported behind."""
    assert ahead(tmp_path, script) == expected


def test_modules_beside_the_script_are_followed_and_never_imported(tmp_path: Path) -> None:
    """In the order in which the script would import them, packages among them."""
    script = "import model\nfrom parts import inner\nimport transformers"
    beside = {
        "model.py": "import torch\nif __name__ == '__main__':\n    call()",
        "parts/__init__.py": "import dlac_pipeline",
        "parts/inner.py": "from . import other\nimport accelerate\nimport model",
        "parts/other.py": "import deepspeed",
    }
    assert ahead(tmp_path, script, beside) == ["torch", *DLAC, "deepspeed", "accelerate", "transformers"]
    assert "model" not in sys.modules


def test_a_module_beside_the_script_that_acts_ends_it(tmp_path: Path) -> None:
    """It may set the environment for all that the script imports behind it."""
    beside = {"setup.py": "import os\nos.putenv('A', 'b')"}
    assert ahead(tmp_path, "import torch\nimport setup\nimport transformers", beside) == ["torch"]


def test_a_module_of_the_scripts_own_hides_a_library(tmp_path: Path) -> None:
    """The script finds its own under that name; a folder that is no package hides nothing."""
    (tmp_path / "transformers").mkdir()
    assert ahead(tmp_path, "import datasets\nimport transformers", {"datasets.py": "N = 1"}) == ["transformers"]


def test_beside_accelerators_only_what_does_not_open_the_driver(tmp_path: Path) -> None:
    """Any of them, as a container may have one that is not the first."""
    assert ahead(tmp_path, "import torch\nimport deepspeed\nimport dlac_pipeline", accelerated=True) == ["torch", *DLAC]
    (tmp_path / "null").touch()
    (tmp_path / "nvidiactl").touch()
    assert not accelerated(tmp_path)
    (tmp_path / "nvidia5").touch()
    assert accelerated(tmp_path)


def test_a_library_that_is_hidden_by_a_module_of_the_scripts_own_is_not_kept(tmp_path: Path) -> None:
    """DLAC has imported it for itself, and the script imports its own under the same name, as in a new Python."""
    (tmp_path / "tenacity.py").write_text("MINE = True\n")
    (tmp_path / "catalog.py").write_text("")
    (tmp_path / "script.py").write_text("import dlac_pipeline.audit\n")
    program = (
        "import sys; from pathlib import Path; from dlac_pipeline.ranks import ahead, rank\n"
        "ahead._LIGHT['dlac_pipeline'] = ('catalog.retrying',)\n"
        f"ahead.import_ahead(Path({str(tmp_path / 'script.py')!r}))\n"
        "assert 'catalog.retrying' in sys.modules, 'what was loaded before stays'\n"
        "sys.path.insert(0, str(Path(sys.argv[1]))); import tenacity; assert tenacity.MINE"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
