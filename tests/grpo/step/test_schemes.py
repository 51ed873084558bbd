"""The scheme of each loss, chosen from plain data; that each is exact is held by tests/grpo/test_trainer.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from types import SimpleNamespace  # noqa: E402

from memprof.grpo.step.schemes import SEQUENCE, TOKEN, TWO_PASS, LossTerms, scheme_of  # noqa: E402

PLAIN = LossTerms(
    is_trls=True,
    may_be_scaled_later=False,
    loss_type="dapo",
    beta=0.0,
    importance_sampling_level="token",
    top_entropy_quantile=1.0,
    off_policy_mask_threshold=None,
    entropy_bonus=False,
)
ON_POLICY: dict[str, Any] = {}
OFF_POLICY = {"old_per_token_logps": torch.zeros(1)}


@pytest.mark.parametrize(
    ("terms", "settings", "inputs", "scheme"),
    [
        ({}, {}, ON_POLICY, TOKEN),
        ({}, {}, OFF_POLICY, TOKEN),
        ({"beta": 0.1}, {}, ON_POLICY, TOKEN),
        ({"beta": 0.1}, {"use_bias_correction_kl": True}, OFF_POLICY, TOKEN),
        ({"loss_type": "vespo"}, {}, ON_POLICY, TOKEN),
        ({"loss_type": "vespo"}, {}, OFF_POLICY, SEQUENCE),
        ({"importance_sampling_level": "sequence"}, {}, ON_POLICY, TOKEN),
        ({"importance_sampling_level": "sequence"}, {}, OFF_POLICY, SEQUENCE),
        (
            {"importance_sampling_level": "sequence", "beta": 0.1},
            {"use_bias_correction_kl": True},
            ON_POLICY,
            SEQUENCE,
        ),
        ({"off_policy_mask_threshold": 0.1}, {}, ON_POLICY, SEQUENCE),
        ({"off_policy_mask_threshold": 0.0}, {}, ON_POLICY, SEQUENCE),
        ({"top_entropy_quantile": 0.5}, {}, ON_POLICY, TWO_PASS),
        ({"loss_type": "a loss of tomorrow"}, {}, ON_POLICY, TWO_PASS),
        ({"is_trls": False}, {}, ON_POLICY, TWO_PASS),
        ({}, {"exact_two_pass": "always"}, ON_POLICY, TWO_PASS),
        ({"balances": True}, {}, ON_POLICY, TWO_PASS),
    ],
)
def test_the_cheapest_scheme_that_is_exact(
    terms: dict[str, Any], settings: dict[str, Any], inputs: dict[str, Any], scheme: str
) -> None:
    given: Any = SimpleNamespace(
        **{"exact_two_pass": "auto", "use_bias_correction_kl": False, **settings}
    )
    found = scheme_of(replace(PLAIN, **terms), given, inputs, scales=False)
    assert (found.name, bool(found.why)) == (scheme, True)
    # Without a ratio that moves and without a KL the gradient is known before any log-probability is.
    assert found.known_before == (scheme == TOKEN and inputs is ON_POLICY and not terms.get("beta"))
    # What a router's auxiliary loss counts is all in one piece.
    alone = scheme_of(replace(PLAIN, **terms), given, inputs, scales=False, one_piece=True)
    assert alone.name == (TOKEN if "balances" in terms else scheme)
    # Gradients that are scaled in fp16 are never computed in the forward.
    assert scheme_of(replace(PLAIN, **terms), given, inputs, scales=True).name == (
        SEQUENCE if scheme == TOKEN else scheme
    )
