"""What options of other trainers are called here, for messages and for the documents.

The other trainers are transformers' Trainer, TRL, Axolotl and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from inspect import Parameter, signature
from typing import NamedTuple, ParamSpec, TypeVar

from dynmo.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class Counterpart(NamedTuple):
    """Options of other trainers, and what to use instead.

    Attributes:
        names: The options, with a space between two.
        file: In a configuration file, or on the command line. Empty if there is nothing.
        python: In Python. Empty if there is nothing.
        note: What to know of it.
    """

    names: str
    file: str
    python: str
    note: str


# A row goes on in lines that begin with spaces.
_TABLE = """
per_device_train_batch_size micro_batch_size | train.micro_batch | Training(micro_batch=) | samples
  of a microbatch
gradient_accumulation_steps | train.global_batch | Pipeline(microbatches=) | the global batch is
  micro_batch * replicas * steps of accumulation
train_batch_size batch_size | train.global_batch | Pipeline(microbatches=) | samples of a step over
  all replicas
per_device_eval_batch_size eval_batch_size | train.eval_batches | Pipeline.evaluate(microbatches=)
  | microbatches of an evaluation, of the same size as in training
num_train_epochs num_epochs max_epochs | train.epochs | Loader(epochs=) | instead of a
  number of steps
max_steps total_steps | train.steps | Pipeline(steps=) | optimizer steps
learning_rate | train.lr | AdamW(lr=) | the peak, after the warmup
lr_scheduler_type lr_scheduler | train.decay | LearningRate(decay=) | cosine, linear or constant
warmup_steps warmup_ratio | train.warmup | LearningRate(warmup=) | a number of steps: a ratio of
  0.03 of 1000 steps is 30
min_lr min_lr_rate cosine_min_lr_ratio lr_scheduler_kwargs | train.min_lr_ratio |
  LearningRate(min_lr_ratio=) | 0.1 unless set, and transformers' cosine ends at 0
optim | train.optimizer | Pipeline(optimizer=) | adamw, sgd, one of torch, or yours
adam_beta1 adam_beta2 | train.betas | AdamW(betas=) | both in a list
adam_epsilon | train.eps | AdamW(eps=) | epsilon of AdamW
gradient_clipping clip_grad_norm | train.max_grad_norm | Training(max_grad_norm=) | 0 never clips
bf16 bfloat16 | train.precision = "bfloat16" | Pipeline(precision="bfloat16") | with float32 master
  weights
fp16 | train.precision = "float16" | Pipeline(precision="float16") | with float32 master weights
  and a loss scale
dtype torch_dtype | train.precision | Pipeline(precision=) | the type that layers compute in
gradient_checkpointing activation_checkpointing | train.recompute = "auto" |
  Training(recompute="auto") | as many layers as the memory limit needs; all recomputes every layer
attn_implementation flash_attention flash_attn | | | attention is the default of
  transformers, sdpa
torch_compile | train.compile = true | Training(compile=True) | off by default
use_liger_kernel liger_fused_linear_cross_entropy | train.head_tokens | Training(head_tokens=) |
  logits of so many tokens exist at once
packing sample_packing padding_free | data.batching = "packed" | Loader(batching="packed") |
  several samples in a row, which do not see one another
group_by_length | data.batching = "grouped" | Loader(batching="grouped") | microbatches of a step
  alike in cost
max_seq_length max_length sequence_len cutoff_len | model.sequence | Loader(sequence=) | tokens
  after which a sample is cut
assistant_only_loss completion_only_loss train_on_inputs | data.answers_only |
  Loader(answers_only=) | whether the loss counts answers and completions alone
train_dataset dataset datasets dataset_name | data.source | Loader(source=) | a file, a folder or a
  dataset that is on this machine
eval_dataset test_datasets val_set_size | data.held_out | Loader(held_out=) | a share of the data,
  or a source of its own
seed data_seed | seed | Loader(seed=) | one seed for weights, data and dropout
eval_steps eval_strategy evals_per_epoch | train.eval_every | Pipeline.evaluate(inputs=) | steps
  between two evaluations
save_steps save_strategy saves_per_epoch | checkpoint.every | Checkpoints(every=) | steps between
  two checkpoints, or "auto": ten minutes
save_total_limit | checkpoint.keep | Checkpoints(keep=) | 2 unless set
load_best_model_at_end metric_for_best_model | checkpoint.keep_best = true | Pipeline.save(best=) |
  the checkpoint with the lowest held-out loss stays, and is exported with --best
early_stopping_patience | train.patience | Pipeline.evaluate(inputs=) | evaluations without a lower
  loss after which a run ends
logging_steps logging_strategy logging_first_step | | Log(listen=) | every step is in
  runs/NAME/events.jsonl
report_to use_wandb wandb_project | metrics.to | Log(listen=) | csv, tensorboard, wandb, or
  yours
output_dir logging_dir run_name | name | Pipeline.save(folder=) | runs/NAME has all
resume_from_checkpoint auto_resume_from_checkpoints | dynmo train --resume | Pipeline(resume=) |
  goes on from the newest checkpoint
load_in_4bit load_in_8bit quantization_config | | | weights are not quantized; more ranks
  (parallel.pipeline) hold a larger model
model_name_or_path name_or_path base_model pretrained_model_name_or_path | model.path |
  huggingface.from_pretrained(source=) | a folder on this machine, with model.kind = "hf"
peft_config use_peft adapter | model.lora | huggingface.from_pretrained(lora=) | adapters of peft
lora_r lora_rank | model.lora.r | huggingface.from_pretrained(lora=) | r of peft.LoraConfig
lora_alpha | model.lora.alpha | huggingface.from_pretrained(lora=) | lora_alpha of peft.LoraConfig
lora_dropout | model.lora.dropout | huggingface.from_pretrained(lora=) | lora_dropout of
  peft.LoraConfig
lora_target_modules target_modules lora_target_linear | model.lora.targets |
  huggingface.from_pretrained(lora=) | target_modules of peft.LoraConfig
use_rslora use_dora modules_to_save lora_modules_to_save init_lora_weights | |
  huggingface.from_pretrained(lora=) | an option of peft.LoraConfig, in Python alone
merge_lora merge_and_unload | dynmo checkpoint export --merge | huggingface.save_pretrained(merge=)
  | adapters become a part of the weights
compute_loss_func loss_func loss_type | train.loss | huggingface.from_pretrained(loss=) | a
  function of logits and labels
compute_metrics | | Pipeline.evaluate(metrics=) | dynmo train reports the held-out loss alone
deepspeed fsdp fsdp_config pipeline_model_parallel_size pp_size | parallel.pipeline |
  Parallel(pipeline=) | ranks of a pipeline; parallel.replicas and parallel.zero train in parallel
  to it
tensor tensor_parallel tensor_parallel_size tensor_model_parallel_size tp tp_size context
  context_parallel context_parallel_size cp cp_size sequence_parallel | | | no layer and no
  sequence is cut (docs/does-not-do.md); more ranks (parallel.pipeline) hold a larger model
zero_stage zero_optimization | parallel.zero = 1 | Parallel(zero=1) | shards the optimizer state
  over replicas
use_cpu no_cuda | parallel.device = "cpu" | init(device="cpu") | no GPU is used
ddp_timeout | parallel.timeout | init(timeout=) | seconds after which a wait fails
dataloader_num_workers dataset_num_proc | dynmo data --workers | | a thread reads ahead; dynmo data
  --out tokenises ahead
"""

# Keywords of an earlier version, and what to do instead.
_FORMER = {
    "keys": "use samples=, which has the samples of each microbatch, such as their numbers",
    "w_granularity": "leave it out: each W runs where the schedule has it",
}

COUNTERPARTS = tuple(
    Counterpart(*map(str.strip, row.split("|")))
    for row in _TABLE.strip().replace("\n  ", " ").splitlines()
)


def counterpart(name: str, *, python: bool = False) -> str | None:
    """Returns what to use instead of an option of another trainer. None if it is unknown."""
    for each in COUNTERPARTS:
        if name in each.names.split():
            use = each.python if python else each.file
            return f"use {use}: {each.note}" if use else each.note
    return None


def check_names(function: Callable[..., object], names: Iterable[str]) -> None:
    """Raises ConfigError for keywords that a function does not have, with what to use instead."""
    known, of = _parameters(function), function.__qualname__.removesuffix(".__init__")
    for name in names:
        if name not in known:
            former = None if name == "keys" and "samples" not in known else _FORMER.get(name)
            own = ", ".join(each for each in known if each != "self")
            advice = former or counterpart(name, python=True) or f"its arguments are {own}"
            raise ConfigError(f"{of} has no {name}; {advice}")


@cache
def _parameters(function: Callable[..., object]) -> Mapping[str, Parameter]:
    return signature(function).parameters


def names_checked(function: Callable[P, T]) -> Callable[P, T]:
    """Refuses keywords that a function does not have, with what to use instead."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        check_names(function, kwargs)
        return function(*args, **kwargs)

    return call
