"""Causal language models of transformers as lists of layers."""

from dynmo.models.huggingface.installed import check_installed

check_installed()
