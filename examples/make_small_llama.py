"""Writes a small Llama and its tokenizer: python examples/make_small_llama.py FOLDER"""

import json
import sys

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = sys.argv[1]
trained = ByteLevelBPETokenizer()
trained.train([json.__file__], vocab_size=300, special_tokens=["<end>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>")
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=0,
)
torch.manual_seed(0)
LlamaForCausalLM(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
print(f"{folder}: {len(tokenizer)} tokens")
