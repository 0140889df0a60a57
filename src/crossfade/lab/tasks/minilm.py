"""MiniLM: a real sentence encoder whose embeddings are to be kept. Runs on the CPU, with no network."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from .. import text as texts
from ..inputs import InputError
from ..pretrained import embed, find_attentions, load_encoder
from ._text import averaged, call_inputs, without_dropout
from .base import TASKS, Batch, Loaded, Part, Task, evaluating

__all__ = ["MiniLM", "vader_topics"]

VADER = "vaderSentiment==3.3.2"
MOST_BYTES = 2**26  # of a text file inside an archive; a small archive cannot claim more memory


@TASKS.add("minilm")
class MiniLM(Task):
    """all-MiniLM-L6-v2 (22.7 million parameters, post-norm, Apache-2.0) from its package, and sentences.

    The label of a text is the original's own embedding, so nobody has to label anything. Mean-pooled classification
    would forgive dead attentions; this score does not. Dropout is removed from the model for good: the label is a
    function of the text, and the noise would only cost time.

    Attributes:
        model: A transformers folder or hub id instead of the package's encoder.
        text: `pydoc`, Python's own reference text (PSF licence), split by topic; or `vader`, 23,703 rated sentences
            from film reviews, tweets, product reviews and editorials (Hutto and Gilbert 2014; MIT), split by review or
            editorial where the file tells.
        path: For `vader`: the sdist of vaderSentiment, or a folder with its `*_GroundTruth.txt`.
        length: Tokens per text; longer texts are cut.
        train: Texts of this part at most; the same for the next two. Texts are taken evenly over the part.
        validation: As above.
        test: As above.
    """

    model: str | None = None
    text: Literal["pydoc", "vader"] = "pydoc"
    path: Path | None = None
    length: int = Field(default=64, ge=8)
    train: int = Field(default=2048, ge=1)
    validation: int = Field(default=64, ge=1)
    test: int = Field(default=300, ge=1)

    def load(self) -> Loaded:
        """Model and data; the original embeds all texts once, which takes about half a minute of one core."""
        return _Loaded(self)


class _Loaded(Loaded):
    metric = "cosine to the original embeddings"

    def __init__(self, task: MiniLM) -> None:
        split = _split(task)
        encoder = load_encoder(task.model, length=task.length)
        self.model = without_dropout(encoder.model)
        self.targets, _ = find_attentions(self.model, None)
        parts: dict[Part, tuple[str, ...]] = {
            "train": split.train,
            "validation": split.validation,
            "test": split.held_out,
        }
        self.sizes = {part: len(found) for part, found in parts.items()}
        self.tokens = {part: encoder.tokens(found) for part, found in parts.items()}
        self.lengths = {part: found["attention_mask"].sum(1) for part, found in self.tokens.items()}
        self.embeddings = {part: self._embedded(part) for part in parts}
        self.facts = {
            "data": split.source,
            "model": encoder.source,
            "mean_baseline": self._mean_baseline(),
        }

    def batch(self, index: Tensor, part: Part = "train", generator: torch.Generator | None = None) -> Batch:
        """`input_ids` and `attention_mask` [b, L], `embedding` [b, D]."""
        found = {name: tensor[index] for name, tensor in self.tokens[part].items()}
        return {**found, "embedding": self.embeddings[part][index]}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Unit vectors [b, D]."""
        return embed(model, call_inputs(model, batch))

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """1 - cosine to the original's embedding."""
        return _far(output, batch["embedding"])

    def distance(self, output: Tensor, original: Tensor, batch: Batch, temperature: float) -> Tensor:
        """1 - cosine to the original's output. The temperature has no meaning here."""
        return _far(output, original)

    def score(self, model: nn.Module, part: Part, most: int | None = None) -> float:
        """Mean cosine to the original's embeddings."""

        def measure(output: Tensor, batch: Batch) -> tuple[float, float]:
            return float((output.double().cpu() * batch["embedding"].double().cpu()).sum()), float(len(output))

        return averaged(self, model, part, most, measure, size=64, lengths=self.lengths[part])

    def _embedded(self, part: Part) -> Tensor:
        """The original's embeddings of a part. Shapes: [N, D]."""
        order = self.lengths[part].argsort(stable=True)
        with evaluating(self.model):
            found = [
                self.forward(self.model, {name: t[i] for name, t in self.tokens[part].items()}) for i in order.split(64)
            ]
        return torch.cat(found)[order.argsort()]

    def _mean_baseline(self) -> float:
        """The score of a constant: what an answer without looking at the text reaches."""
        constant = functional.normalize(self.embeddings["train"].double().mean(0), dim=0)
        return float((self.embeddings["test"].double() @ constant).mean())


def _far(a: Tensor, b: Tensor) -> Tensor:
    return 1.0 - functional.cosine_similarity(a.float(), b.to(a.device).float(), dim=-1).mean()


def _split(task: MiniLM) -> texts.Split:
    if task.text == "vader":
        found = texts.split(f"the rated sentences of {VADER}", vader_topics(task.path))
    elif task.path is not None:
        raise InputError("only the text `vader` is read from a path.", where="task.path", got=task.path)
    else:
        found = texts.split("Python's own reference text", texts.pydoc_topics())
    return found.capped(train=task.train, validation=task.validation, held_out=task.test)


def vader_topics(path: Path | None) -> dict[str, list[str]]:
    """The rated sentences, by the review or editorial that they come from: name -> sentences.

    Films and tweets carry no such number, so each of their sentences stands alone.

    Args:
        path: The sdist of vaderSentiment (nothing is unpacked to disk), or a folder with its `*_GroundTruth.txt`.

    Raises:
        InputError: No path, or no sentences there.
    """
    how = f"pip download --no-deps --no-binary :all: '{VADER}', and name the file: --set task.path=FILE"
    if path is None:
        raise InputError("the rated sentences are not part of any wheel.", do=how)
    topics: dict[str, list[str]] = {}
    try:
        for name, content in _ground_truth(path.expanduser()):
            for line in content.decode("utf-8", errors="replace").splitlines():
                number, _, sentence = (*line.split("\t", 2), "", "")[:3]
                sentence = " ".join(sentence.split())
                if len(sentence) >= texts.SHORTEST:
                    topics.setdefault(f"{name} {number.partition('_')[0]}", []).append(sentence)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise InputError("the rated sentences cannot be read.", where=path, got=error, do=how) from None
    if not topics:
        raise InputError("no rated sentences were found.", where=path, expected="*_GroundTruth.txt", do=how)
    return topics


def _ground_truth(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file of sentences."""
    if path.is_dir():
        for file in sorted(path.glob("**/*_GroundTruth.txt")):
            yield file.name, file.read_bytes()
    else:
        yield from _in_archive(path.read_bytes(), depth=0)


def _in_archive(content: bytes, depth: int) -> Iterator[tuple[str, bytes]]:
    """The files of sentences in an archive, or in an archive inside it."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            name = Path(member.name).name
            inner = name.endswith(".tar.gz") and depth == 0
            if not member.isfile() or member.size > MOST_BYTES or not (inner or name.endswith("_GroundTruth.txt")):
                continue
            opened: Any = archive.extractfile(member)
            if inner:
                yield from _in_archive(opened.read(), depth + 1)
            else:
                yield name, opened.read()
