"""Small trainings of kinds that no rule was written for keep their names."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.truth.score import score_case
from benchmarks.truth.small import halves, record_small


def test_programs_are_split_once() -> None:
    parts = halves()
    assert len(parts["first"]) == len(parts["second"]) == 8
    assert not set(parts["first"]) & set(parts["second"])


# A recurrent model has no norms that show its width; adapters made apart are no model, whatever their base; towers,
# encoders and decoders of one model are no references. One line may make a teacher and its student, or a policy and its
# critic; gradients in a list are as many as two for a parameter.
@pytest.mark.parametrize(
    "name", ["recurrent", "own_adapters", "vision_language", "autoencoder", "distillation", "functional", "replayed"]
)
def test_nearly_every_byte_at_the_peak_is_right(name: str, tmp_path: Path) -> None:
    for path in record_small(name, tmp_path):
        score = score_case(path).instants["peak"]
        # Blocks older than the history have no order: there a critic made by the same line is part of the policy.
        least = 0.95 if path.name == "replayed.after_load.pickle" else 0.99
        assert score.accuracy >= least, (path.name, score.worst.most_common(3))
        certain = sum(score.evidence[kind, False] for kind in ("owner", "metadata", "stack"))
        assert certain <= 0.001 * score.total, path.name
