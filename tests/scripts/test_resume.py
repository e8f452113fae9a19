"""A training that is killed with SIGKILL at a random moment goes on with the same bits.

One trial; `python scripts/resume_trials.py` makes twenty, of a larger model.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import resume_trials  # noqa: E402

pytestmark = pytest.mark.slow

SMALL = {
    "num-layers": "2",
    "moe-layer-freq": "[0,1]",
    "hidden-size": "32",
    "ffn-hidden-size": "64",
    "moe-ffn-hidden-size": "16",
    "seq-length": "32",
    "max-position-embeddings": "32",
    "micro-batch-size": "2",
    "global-batch-size": "8",
}


def test_a_killed_training_continues_with_the_same_bits(tmp_path: Path) -> None:
    arguments = tuple(word for key, value in SMALL.items() for word in (f"--{key}", value))
    plan = resume_trials.Plan(
        config=resume_trials.CONFIG, arguments=arguments, iterations=8, interval=2
    )
    seed = secrets.randbits(32)
    (trial,) = resume_trials.run_trials(plan, 1, seed, tmp_path)
    assert not trial.trouble, f"seed {seed}: {trial}"
