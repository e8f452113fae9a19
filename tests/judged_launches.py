"""What Megatron and the rules say to a command line, on a machine without Transformer Engine.

It is pretended to be there while arguments are judged; nothing is built.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from tests.ranks import run_ranks


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Lines of a refusal by rules; what is done anyway; the fields that were asked for."""

    refusals: list[str] = field(default_factory=list)
    anyway: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Question:
    gpus: int
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()


def judge(questions: dict[str, Question]) -> dict[str, Answer]:
    """In another process. What Megatron itself refuses is raised there."""
    return run_ranks(1, _judge, questions, deadline=120)[0]


def _judge(rank: int, world: int, questions: dict[str, Question]) -> dict[str, Answer]:
    import mok_megatron
    from mok_megatron import cpu

    mok_megatron.activate()
    cpu.install()
    import torch
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_utils
    from megatron.training import argument_utils, arguments

    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    for module in (transformer_config, arguments):
        module.is_te_min_version = lambda *wanted, **named: True
    rope_utils.fused_apply_rotary_pos_emb = print
    for name in [name for name in vars(moe_utils) if name.startswith("fused_")]:
        setattr(moe_utils, name, print)
    answers = {}
    for name, question in questions.items():
        overlaps = "--overlap-moe-expert-parallel-comm" in question.words
        os.environ |= {
            "WORLD_SIZE": str(question.gpus),
            "CUDA_DEVICE_MAX_CONNECTIONS": "32" if overlaps else "1",
            **question.environment,
        }
        sys.argv = ["pretrain_gpt.py", *question.words]
        args: Any = arguments.parse_args()
        try:
            arguments.validate_args(args)
            args.padded_vocab_size = 1000
            config = argument_utils.core_transformer_config_from_args(args)
            fields = {key: getattr(config, key) for key in question.fields}
            answers[name] = Answer(anyway=config.mok_already_done, fields=fields)
        except ValueError as error:
            refusals = str(error).splitlines()
            if not refusals[0].startswith("mok: "):
                raise
            answers[name] = Answer(refusals=refusals)
        finally:
            for key in question.environment:
                del os.environ[key]
    return answers
