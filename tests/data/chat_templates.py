"""Chat templates in the style of models that many use, and what a row of theirs is.

A row stands between the lines of its conversation. What the loss counts stands between « and ».
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A chat template.

    Attributes:
        special: Its special tokens, between spaces.
        row: What TALK becomes.
    """

    special: str
    template: str
    row: str


TALK = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]

FAMILIES = {
    "chatml": Family(
        "<|im_start|> <|im_end|>",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n«a2<|im_end|>»\n",
    ),
    "qwen3": Family(
        "<|im_start|> <|im_end|>",
        "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set text = m.content or '' %}"
        "{%- set thought = m.reasoning_content or '' %}"
        "{%- if m.role == 'assistant' and not thought and '</think>' in text %}"
        "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
        "{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
        "{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}{{- text }}"
        "{%- for call in m.tool_calls or [] %}{{- '<tool_call>\n' }}"
        "{{- call.function | tojson }}{{- '\n</tool_call>' }}{%- endfor %}"
        "{{- '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\na2<|im_end|>»\n",
    ),
    "llama3": Family(
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        "{{- '<|begin_of_text|>' }}{%- for m in messages %}"
        "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}"
        "{{- '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nq1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«a1<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nq2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«a2<|eot_id|>»",
    ),
    "mistral": Family(
        "<s> </s> [INST] [/INST]",
        "{{- '<s>' }}{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('roles must alternate') }}{%- endif %}{%- if m.role == 'user' %}"
        "{{- '[INST] ' + m.content + ' [/INST]' }}{%- else %}{{- ' ' + m.content + '</s>' }}"
        "{%- endif %}{%- endfor %}",
        "<s>[INST] q1 [/INST]« a1</s>»[INST] q2 [/INST]« a2</s>»",
    ),
    "gemma": Family(
        "<bos> <start_of_turn> <end_of_turn>",
        "{{ '<bos>' }}{% for m in messages %}"
        "{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "<bos><start_of_turn>user\nq1<end_of_turn>\n<start_of_turn>model\n«a1<end_of_turn>»\n"
        "<start_of_turn>user\nq2<end_of_turn>\n<start_of_turn>model\n«a2<end_of_turn>»\n",
    ),
    "phi": Family(
        "<|user|> <|assistant|> <|end|> <|endoftext|>",
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}"
        "{% endif %}",
        "<|user|>\nq1<|end|>\n<|assistant|>\n«a1<|end|>»\n"
        "<|user|>\nq2<|end|>\n<|assistant|>\n«a2<|end|>»\n<|endoftext|>",
    ),
    "deepseek-r1": Family(
        "<begin> <finish>",
        "{{ '<begin>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}"
        "{% else %}{{ '<Assistant>' + m.content.split('</think>')[-1] + '<finish>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}",
        "<begin><User>q1<Assistant>«a1<finish>»<User>q2<Assistant>«a2<finish>»",
    ),
    "harmony": Family(
        "<|start|> <|channel|> <|message|> <|end|> <|return|>",
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- if m.thinking and loop.last %}"
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
        "{%- endif %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- else %}"
        "{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}",
        "<|start|>user<|message|>q1<|end|>"
        "<|start|>assistant«<|channel|>final<|message|>a1<|end|>»"
        "<|start|>user<|message|>q2<|end|>"
        "<|start|>assistant«<|channel|>final<|message|>a2<|return|>»",
    ),
    "zephyr": Family(
        "</s>",
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "<|user|>\nq1</s>\n<|assistant|>\n«a1</s>»\n<|user|>\nq2</s>\n<|assistant|>\n«a2</s>»\n",
    ),
    "command-r": Family(
        "<B> <T> </T> <U> <C>",
        "{{ '<B>' }}{% for m in messages %}{{ '<T>' + ('<U>' if m.role == 'user' else '<C>') }}"
        "{{ m.content | trim + '</T>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<T><C>' }}{% endif %}",
        "<B><T><U>q1</T><T><C>«a1</T>»<T><U>q2</T><T><C>«a2</T>»",
    ),
    # The next turn ends an answer.
    "glm": Family(
        "[gMASK] <sop> <|user|> <|assistant|>",
        "[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "[gMASK]<sop><|user|>\nq1<|assistant|>\n«a1<|user|>»\nq2<|assistant|>\n«a2»",
    ),
    # The prompt opens a thought, and earlier answers have none. Two line ends are one token, which
    # begins in the prompt.
    "qwen3.5": Family(
        "<|im_start|> <|im_end|>",
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' and loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
        "{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}",
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
        "«</think>\n\na2<|im_end|>»\n",
    ),
    # Something stands before the last question alone.
    "moving-system": Family(
        "</s> [INST] [/INST]",
        "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST]' }}"
        "{%- if loop.index0 >= messages | length - 2 %}{{- 'be kind\n\n' }}{%- endif %}"
        "{{- m.content + '[/INST]' }}{%- else %}{{- m.content + '</s>' }}{%- endif %}{%- endfor %}",
        "[INST]q1[/INST]«a1</s>»[INST]be kind\n\nq2[/INST]«a2</s>»",
    ),
}
