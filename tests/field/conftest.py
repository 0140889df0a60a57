"""Known defects: field cases that crossfade does not handle yet, each a strict expected failure.

`known_defects.txt` lists them by test id. A listed test that passes fails the run, so the list can only shrink with the
defects.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LISTED = set((Path(__file__).parent / "known_defects.txt").read_text(encoding="utf-8").split("\n")) - {""}
REASONS = {
    "test_fc02": "the main input of a keyword-only call is the first floating tensor, whatever its name",
    "test_fc06": "attributes of the blend itself (weight, alpha, path, ...) hide the teacher's of the same name",
    "test_fc27": "with a padding mask torch's encoder rounds differently by 1e-6 once the blends are gone",
    "test_fc29": "an average that is updated before handle(average).follow(fade) pairs other parameters",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in LISTED:
            reason = next(text for prefix, text in REASONS.items() if prefix in item.nodeid)
            item.add_marker(pytest.mark.xfail(strict=True, reason=reason))
