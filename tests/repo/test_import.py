"""`import crossfade` brings torch, safetensors and nothing else, and leaves the process as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import crossfade

# What the extras bring, and numpy, which safetensors needs for saving but our code never imports itself.
NOT_OURS = [
    "accelerate",
    "datasets",
    "fla",
    "gguf",
    "huggingface_hub",
    "lightning",
    "matplotlib",
    "numpy",
    "pandas",
    "PIL",
    "pydantic",
    "rich",
    "scipy",
    "timm",
    "tokenizers",
    "torchvision",
    "tqdm",
    "transformers",
    "typer",
    "yaml",
]

# Everything that an import could change behind the user's back. The probe imports the dependencies first,
# so that their own side effects are not laid at our door.
PROBE = """
import json, logging, os, random, signal, sys, threading, warnings
import torch, safetensors.torch

def state():
    registered = logging.Logger.manager.loggerDict.items()
    loggers = {name: log for name, log in registered if isinstance(log, logging.Logger)}
    loggers["root"] = logging.getLogger()
    return {
        "environment": dict(os.environ),
        "log handlers": {name: repr(log.handlers) for name, log in loggers.items() if log.handlers},
        "log levels": {name: log.level for name, log in loggers.items() if log.level},
        "disabled loggers": [name for name, log in loggers.items() if log.disabled],
        "warning filters": [repr(f) for f in warnings.filters],
        "showwarning": repr(warnings.showwarning),
        "torch random state": torch.get_rng_state().tolist(),
        "python random state": repr(random.getstate()),
        "numpy random state": repr(sys.modules["numpy"].random.get_state()) if "numpy" in sys.modules else "",
        "default dtype": str(torch.get_default_dtype()),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "excepthook": repr(sys.excepthook),
        "sigint": repr(signal.getsignal(signal.SIGINT)),
        "path": list(sys.path),
        "python threads": threading.active_count(),
        "recursion limit": sys.getrecursionlimit(),
    }

before, modules = state(), set(sys.modules)
import crossfade
after = state()
print(json.dumps({
    "changed": {key: [before[key], after[key]] for key in before if before[key] != after[key]},
    "watched": sorted(before),
    "new": sorted(set(sys.modules) - modules),
}))
"""

# Stands for an environment without extras: their modules cannot be found.
BLOCK = """
import sys

class Blocked:
    names = set({names!r})
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(code: str) -> str:
    """Runs `code` in a Python of its own and returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What an import of crossfade changed in a fresh process."""
    result = json.loads(run(PROBE).splitlines()[-1])
    assert isinstance(result, dict)
    return result


def test_import_loads_no_third_party_module_but_torch_and_safetensors(seen: dict[str, Any]) -> None:
    assert "crossfade" in seen["new"]
    allowed = {"crossfade", "torch", "safetensors", *sys.stdlib_module_names}
    foreign = sorted({name for name in seen["new"] if name.partition(".")[0] not in allowed})
    assert not foreign, f"import crossfade also imports {foreign}"


def test_import_loads_neither_the_command_line_nor_the_lab_nor_an_integration(seen: dict[str, Any]) -> None:
    outer = [name for name in seen["new"] if name.startswith(("crossfade.cli", "crossfade.lab", "crossfade.integr"))]
    assert outer == []


def test_import_changes_nothing_in_the_process(seen: dict[str, Any]) -> None:
    assert len(seen["watched"]) > 15
    assert seen["changed"] == {}


def test_import_works_without_any_extra() -> None:
    code = BLOCK.format(names=NOT_OURS) + (
        "import warnings\n"
        "warnings.filterwarnings('ignore', 'Failed to initialize NumPy')\n"
        "import crossfade, crossfade.students\n"
        "for name in crossfade.__all__: getattr(crossfade, name)\n"
        "print(len(crossfade.__all__))\n"
    )
    assert int(run(code)) == len(crossfade.__all__)


def test_import_prints_nothing_and_warns_nothing() -> None:
    code = "import torch, safetensors.torch, warnings\nwarnings.simplefilter('error')\nimport crossfade\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_front_door_holds_at_most_twenty_names() -> None:
    assert 5 < len(crossfade.__all__) <= 20
    assert len(set(crossfade.__all__)) == len(crossfade.__all__)
    missing = [name for name in crossfade.__all__ if not hasattr(crossfade, name)]
    assert not missing, f"__all__ names what does not exist: {missing}"
