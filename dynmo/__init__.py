"""dynmo: pipeline-parallel training of language models whose work changes while they train."""
