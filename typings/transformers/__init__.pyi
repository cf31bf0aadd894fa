# The names that dynmo imports from transformers, each from the module that defines it. The own
# __init__ of transformers imports every model: pyright would read 2,500 more modules.

from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.data.data_collator import DataCollatorForSeq2Seq as DataCollatorForSeq2Seq
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING as MODEL_FOR_CAUSAL_LM_MAPPING,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.gpt2.configuration_gpt2 import GPT2Config as GPT2Config
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.t5.configuration_t5 import T5Config as T5Config
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)
