from __future__ import annotations

import importlib.util
import zipfile
from itertools import chain
from pathlib import Path

import pytest
import torch

import crossfade
from crossfade.lab.inputs import InputError
from crossfade.lab.tasks import TASKS, Loaded
from crossfade.lab.tasks.antiberty import Chain, deal, families, masked_positions, read_chains
from crossfade.lab.tasks.base import Part
from tests.lab.tasks.conftest import genes

V, J = "QVQLVQSGA-EVKKPGASVKVSCKAS", "-----FDYWGQGTLVTVSS"
GERMLINES = {
    "J": {"H": {"human": {"IGHJ4*01": J}}, "K": {}, "L": {}},
    "V": {
        "H": {"human": {"IGHV1-2*01": V, "IGHV1-2*02": V}, "rat": {"IGHV5*01": V[::-1]}},
        "K": {"human": {"short": "QVQ"}},
        "L": {},
    },
}


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_germlines_are_read_from_text_and_from_the_wheel(tmp_path: Path) -> None:
    file = written(tmp_path / "germlines.py", f"all_germlines = {GERMLINES!r}\n")
    chains = read_chains(file)
    core = V.replace("-", "")
    # One of the two alleles with the same V gene; no J gene is known for the rat.
    assert [(c.residues, c.core) for c in chains] == [(core + "FDYWGQGTLVTVSS", core), (core[::-1], core[::-1])]
    with zipfile.ZipFile(tmp_path / "anarci.whl", "w") as wheel:
        wheel.write(file, "anarci/germlines.py")
    assert read_chains(tmp_path / "anarci.whl") == chains


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit('this ran')",
        "x = __import__('os').getcwd()",
        "all_germlines = {'V': 1}",
        "all_germlines = {'V': {'H': {'human': {'a': 3}}}}",
        "x = " + "(" * 5000,
        "",
        "def (",
    ],
)
def test_code_in_place_of_germlines_is_refused_and_never_run(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="germline"):
        read_chains(written(tmp_path / "germlines.py", text))


def test_fasta_and_plain_lines(tmp_path: Path) -> None:
    first, second = "ACDEFGHIKLMNPQRSTVWY", "WYVTSRQPNMLKIHGFEDCA"
    fasta = written(tmp_path / "a.fasta", f">one two\n{first[:8]}\n{first[8:].lower()}*\n>b\n{second}\n>c\nACD\n")
    assert read_chains(fasta) == [Chain("one two", first, first), Chain("b", second, second)]
    plain = written(tmp_path / "a.txt", f"{first}\n\n{second}\n{first}\n")
    assert [one.residues for one in read_chains(plain)] == [first, second]


def test_files_without_sequences_are_bad_input(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    written(tmp_path / "a.whl", "no archive")
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as wheel:
        wheel.writestr("other.py", "")
    for name in ("missing", "bytes", "a.whl", "b.whl"):
        with pytest.raises(InputError, match="cannot be read"):
            read_chains(tmp_path / name)
    with pytest.raises(InputError, match="no sequence"):
        read_chains(written(tmp_path / "short", "ACD\n"))


def test_families_hold_what_is_alike() -> None:
    groups = genes()
    family = families(list(chain.from_iterable(groups)))
    sizes = [len(group) for group in groups]
    parts = family.split(sizes)
    assert all(len(part.unique()) == 1 for part in parts)
    assert len(family.unique()) == len(groups)


def test_a_chain_of_likeness_makes_one_family() -> None:
    """A is like B and B like C, so A and C stay together although they differ."""
    text = "ACDEFGHIKLMNPQRSTVWYAFGHCCDKLMEEWQRSTPVINDYH"
    a, b, c = text[:24], text[8:32], text[16:40]
    assert families([a, c]).tolist() == [0, 1]
    assert families([a, c, b]).tolist() == [0, 0, 0]


def test_no_family_is_in_two_parts_and_order_has_no_say() -> None:
    chains = [Chain(str(i), text, text) for i, text in enumerate(chain.from_iterable(genes()))]
    family = families([one.core for one in chains])
    number = {one.residues: int(n) for one, n in zip(chains, family, strict=True)}
    dealt = deal(chains, family)
    seen = [{number[one.residues] for one in found} for found in dealt.values()]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 12
    assert sum(map(len, dealt.values())) == len(chains)
    assert len(dealt["test"]) <= 0.2 * len(chains)
    assert deal(chains[::-1], family.flip(0)) == dealt


def test_masks_depend_on_the_sequence_alone() -> None:
    sequence = "ACDEFGHIKLMNPQRSTVWY" * 2
    places = masked_positions(sequence, 0.15)
    assert places == masked_positions(sequence, 0.15) == sorted(set(places))
    assert len(places) == 6
    assert 0 <= min(places) <= max(places) < 40
    assert masked_positions(sequence[::-1], 0.15) != places
    assert len(masked_positions("AC", 0.01)) == 1


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_labels_are_what_the_mask_hides(antiberty: Loaded, part: Part) -> None:
    batch = antiberty.batch(torch.arange(antiberty.sizes[part]), part)
    mask, real = 4, batch["label"] != -100
    at = batch["input_ids"].gather(1, batch["position"])
    assert bool((at[real] == mask).all())
    assert bool((batch["label"][real] >= 5).all())
    assert int((batch["input_ids"] == mask).sum()) == int(real.sum())
    assert torch.equal(batch["attention_mask"].bool(), batch["input_ids"] != 0)
    share = real.sum(1) / (batch["attention_mask"].sum(1) - 2)
    assert bool(((share - 0.15).abs() < 0.02).all())


def test_loss_and_accuracy_count_masked_residues_only(antiberty: Loaded) -> None:
    batch = antiberty.batch(torch.arange(6))
    real = batch["label"] != -100
    perfect = torch.zeros(*batch["label"].shape, 25)
    perfect[real] = 50.0 * torch.nn.functional.one_hot(batch["label"][real], 25).float()
    assert float(antiberty.loss(perfect, batch)) < 1e-6
    noisy = perfect.clone()
    noisy[~real] = torch.randn(int((~real).sum()), 25)
    assert torch.equal(antiberty.loss(noisy, batch), antiberty.loss(perfect, batch))
    assert torch.equal(antiberty.distance(noisy, perfect, batch, 1.0), antiberty.distance(perfect, perfect, batch, 1.0))
    uniform = torch.zeros_like(perfect)
    assert float(antiberty.loss(uniform, batch)) == pytest.approx(torch.tensor(25.0).log().item(), rel=1e-5)


def test_missing_files_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, antibody_model: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install --no-deps 'antiberty==0\.1\.3'"):
        TASKS["antiberty"]().load()
    with pytest.raises(InputError, match=r"anarci=="):
        TASKS["antiberty"](weights=antibody_model).load()
    with pytest.raises(InputError, match="vocabulary"):
        TASKS["antiberty"](weights=tmp_path).load()


def test_one_family_is_too_few(tmp_path: Path, antibody_model: Path) -> None:
    file = written(tmp_path / "one.txt", "\n".join(genes(1)[0]))
    with pytest.raises(InputError, match="too few families"):
        TASKS["antiberty"](weights=antibody_model, sequences=file).load()


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_names_masked_residues() -> None:
    for package, release in (("antiberty", "antiberty==0.1.3"), ("anarci", "anarci==2026.2.13.2")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs: pip install --no-deps {release}")
    loaded = TASKS["antiberty"]().load()
    model = loaded.fresh()
    plan = crossfade.Plan(targets=loaded.targets, student=crossfade.students.Reinit(init="model"))
    assert len(crossfade.install(model, plan, total_steps=1).sites) == 8
    crossfade.handle(model).finalize(force=True)
    assert loaded.score(loaded.model, "test", most=64) > 80.0
    assert loaded.score(model, "test", most=64) < 35.0
