"""Continues text with the model of a pipeline."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from dynmo.data.tokenizer import SpecialTokens, has_tokenizer
from dynmo.errors import ConfigError, InputError, one_line
from dynmo.huggingface.save import transformers_model
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.pipeline.pipeline import Pipeline
from dynmo.pipeline.user_calls import public

Prompt = TypeVar("Prompt", Tensor, str)


@public
def generate(
    pipeline: Pipeline,
    ids_or_text: Prompt,
    *,
    max_new_tokens: int = 32,
    tokenizer: Any = None,
    attention_mask: Tensor | None = None,
) -> Prompt:
    """Continues token ids or a text by the most likely tokens.

    All ranks call it together, with the same arguments. Every new token takes a forward over the
    whole sequence, so it is for a look at a model in training, not for serving. The ids are those
    of transformers' `generate(do_sample=False)`. The generation config gives only the ids of the
    end and of padding.

    Args:
        pipeline: The pipeline. Its model is one of `from_pretrained`.
        ids_or_text: Token ids [tokens] or [rows, tokens], or a text. Rows that are shorter than
            others begin with padding. A text is begun as the tokenizer begins one, if it does not
            begin so, and not ended.
        max_new_tokens: Most tokens that are added. A row ends earlier after an id of the end.
        tokenizer: A tokenizer of transformers, for a text and the id of padding. None takes that of
            the model's folder.
        attention_mask: 1 for each id that counts and 0 for padding, in the shape of the ids. None
            finds padding by the ids of the generation config and the tokenizer. Where such an id
            is one of the end, too, only ids at the start of a row are padding.

    Returns:
        The ids with the new ones behind them, as int64 on the CPU, or the text without special
        tokens. The same on every rank.

    Raises:
        ConfigError: The model is not one of transformers, or there is no tokenizer for a text.
        InputError: The ids or the mask have another form, or a row ends with padding.
    """
    model = transformers_model(pipeline.mesh.model, "generate")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens = {max_new_tokens!r}; give 1 or more")
    if isinstance(ids_or_text, str):
        tokenizer = tokenizer or _tokenizer(model.folder)
        if attention_mask is not None:
            raise InputError("attention_mask belongs to token ids; leave it out with a text")
        row = _checked(torch.tensor(SpecialTokens(tokenizer).begun(ids_or_text)).long())
        longer = _continued(pipeline, model, row[None], max_new_tokens)
        return tokenizer.decode(longer[0], skip_special_tokens=True)
    ids = _checked(ids_or_text)
    rows = ids.reshape(-1, ids.shape[-1])
    if attention_mask is None:
        attention_mask = _mask_of(model, rows, tokenizer).reshape(ids.shape)
    mask = _checked_mask(attention_mask, ids).reshape(rows.shape)
    longer = _continued(pipeline, model, rows, max_new_tokens, mask)
    return longer if ids.dim() == 2 else longer[0]


def _continued(
    pipeline: Pipeline,
    model: HuggingFaceModel,
    ids: Tensor,
    max_new_tokens: int,
    mask: Tensor | None = None,
) -> Tensor:
    ends, padding = _special_ids(model)
    inputs = {"input_ids": ids, **_padded(model, mask)}
    unfinished = torch.ones(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        added = torch.where(unfinished, _next_ids(pipeline, inputs), padding or 0)
        unfinished &= ~_among(added, set(ends))
        following = {
            "input_ids": added[:, None],
            "attention_mask": torch.ones(len(ids), 1, dtype=torch.int64),
        }
        if "position_ids" in inputs:
            following["position_ids"] = inputs["position_ids"][:, -1:] + 1
        inputs = {name: torch.cat([x, following[name]], dim=1) for name, x in inputs.items()}
        if not unfinished.any():
            break
    return inputs["input_ids"]


def _next_ids(pipeline: Pipeline, inputs: dict[str, Tensor]) -> Tensor:
    """Returns the most likely next id of each row, on every rank."""
    if pipeline.mesh.model.takes_targets:
        inputs = {**inputs, "labels": torch.full_like(inputs["input_ids"], -100)}
    found = pipeline.evaluate(inputs, outputs=True, microbatches=1, shared=True).outputs
    world = pipeline.mesh.world
    ids = torch.zeros(len(inputs["input_ids"]), dtype=torch.int64)
    if found is not None and world.replica == 0:
        logits = found[0] if isinstance(found, tuple) else found
        ids.copy_(logits[:, -1].float().argmax(-1))
    return world.everyone.sum(ids, "the next token")


def _padded(model: HuggingFaceModel, mask: Tensor | None) -> dict[str, Tensor]:
    """Returns the inputs beside the ids, if some ids are padding."""
    if mask is None or bool(mask.all()):
        return {}
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    known = inspect.signature(model.structure.model.forward).parameters
    given = {"attention_mask": mask, "position_ids": positions}
    return {name: value for name, value in given.items() if name in known}


def _mask_of(model: HuggingFaceModel, ids: Tensor, tokenizer: Any) -> Tensor:
    """Returns the mask of ids that may be padded.

    An id of padding that means nothing else is padding anywhere. One that also ends or begins a
    text is padding at the start of a row, if there are other rows.
    """
    ends, padding = _special_ids(model)
    if tokenizer is None and len(ids) > 1 and model.folder and has_tokenizer(model.folder):
        tokenizer = _tokenizer(model.folder)
    pads, begins = {padding}, list[int]()
    if tokenizer is not None:
        pads.add(tokenizer.pad_token_id)
        begins = SpecialTokens(tokenizer).first
    pads -= {None}
    mask = ~_among(ids, pads - {*ends, *begins})
    if len(ids) > 1:
        is_pad = _among(ids, pads)
        leading = is_pad.long().cumprod(-1).bool()
        if not pads.isdisjoint(begins[:1]):  # the last of them begins the row
            leading = torch.cat([leading[:, 1:], torch.zeros_like(leading[:, :1])], dim=1)
        mask &= ~leading
        if tokenizer is not None and tokenizer.padding_side == "right":
            mask[:, -1] &= ~is_pad[:, -1]
    return mask


def _among(ids: Tensor, known: set[Any]) -> Tensor:
    return torch.isin(ids, torch.tensor(sorted(known), dtype=torch.int64))


def _checked_mask(mask: Any, ids: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise InputError(f"attention_mask needs the shape of the ids, {tuple(ids.shape)}")
    mask = (mask.detach().to("cpu") != 0).long()
    if not bool(mask[..., -1].all()):
        raise InputError(
            "a row ends with padding, so there is nothing to continue; put padding before the ids "
            '(tokenizer.padding_side = "left"), or give attention_mask if these ids count'
        )
    return mask


def _special_ids(model: HuggingFaceModel) -> tuple[list[int], int | None]:
    """Returns the ids that end a row, and the id of padding."""
    config = GenerationConfig.from_model_config(model.config)
    if model.folder is not None and (model.folder / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(model.folder)
    given: Any = config.eos_token_id
    ends = [] if given is None else [given] if isinstance(given, int) else list(given)
    padding: Any = config.pad_token_id
    return ends, ends[0] if padding is None and ends else padding


def _tokenizer(folder: Path | None) -> Any:
    try:
        if folder is None:
            raise OSError("the model was made of a config")
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"no tokenizer for the text ({one_line(str(error))[:200]}); give token ids, or "
            "tokenizer=..."
        ) from None


def _checked(ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() not in (1, 2):
        raise InputError("generate takes a text, or token ids [tokens] or [rows, tokens]")
    if not ids.numel():
        raise InputError("generate needs one token at least")
    return ids.detach().to("cpu", torch.int64)
