"""Loading a view into the model that a worker runs, and checking what was loaded.

It drives vLLM's own layerwise reload, so that it can tell: unlike `reload_weights`, which warns at
most where a tensor is missing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from mimo.samplers.vllm.view_files import read_layout


class LoadError(Exception):
  """A view's weights did not all reach the model, or others did."""


class WorkerExtension:
  """Mixed into vLLM's worker: its methods are called through `collective_rpc`."""

  def mimo_load(self, directory: str) -> int:
    """Loads a view into the running model. Returns how many tensors that took.

    Raises LoadError where a tensor of the view was not read, or a parameter of the model not
    wholly loaded. The weights are then unknown, and another load may follow.
    """
    from vllm.config import set_current_vllm_config

    worker: Any = self
    with set_current_vllm_config(worker.vllm_config):
      count = _load_verified(worker.vllm_config, worker.model_runner.get_model(), directory)
    runner = worker.model_runner
    for name in ('reset_encoder_cache', 'reset_mm_cache'):  # what vLLM's own reload resets
      getattr(runner, name)()
    return count


def _load_verified(vllm_config: Any, model: Any, directory: str) -> int:
  import torch
  from vllm.model_executor.model_loader.reload import layerwise

  expected = set(read_layout(directory).tensors)
  seen: list[str] = []
  with torch.device(vllm_config.device_config.device):
    owners = _owners(model)
    layerwise.initialize_layerwise_reload(model)
    try:
      model.load_weights(_tensors(vllm_config, model, directory, seen))
      unread = expected.symmetric_difference(seen)
      if unread or len(seen) != len(expected):
        raise LoadError(f'{len(seen)} tensors read of {len(expected)}: {sorted(unread)[:3]}')
      _check_loaded(owners)
      layerwise.finalize_layerwise_reload(model, vllm_config.model_config)
      _prepare_borrowers(model, owners)
    except BaseException:
      _abandon(model)
      raise
  return len(seen)


def _tensors(vllm_config: Any, model: Any, directory: str, seen: list[str]) -> Iterator[Any]:
  """Yields what vLLM's own loader reads of a directory, and notes its names."""
  from vllm.model_executor.model_loader import get_model_loader
  from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

  loader = get_model_loader(vllm_config.load_config)
  if not isinstance(loader, DefaultModelLoader):
    raise LoadError(f'{type(loader).__name__} cannot reload; expected a loader of safetensors')
  source = copy.copy(vllm_config.model_config)
  source.model, source.revision, source.model_weights = directory, None, ''
  for name, tensor in loader.get_all_weights(source, model):
    seen.append(name)
    yield name, tensor


def _owners(model: Any) -> dict[str, Any]:
  """Returns name -> layer of those that own parameters: a tied head borrows the embedding's."""
  from vllm.model_executor.layers.attention import is_deferred_attention_layer

  owners: dict[str, Any] = {}
  seen: set[int] = set()
  for name, layer in model.named_modules():
    own = {parameter.data_ptr() for parameter in layer.parameters(recurse=False)}
    # Scales of caches belong to attention layers; a view need not hold them.
    if own - seen and not is_deferred_attention_layer(layer):
      owners[name] = layer
    seen |= own
  return owners


def _prepare_borrowers(model: Any, owners: dict[str, Any]) -> None:
  """Has layers that share another's parameters derive again what they derive from them.

  vLLM's reload passes a tied head by, since nothing is loaded into it, and on CPU the head
  multiplies with a packed copy of its own: it would keep the old weights without a word.
  """
  for name, layer in model.named_modules():
    if name in owners or not list(layer.parameters(recurse=False)):
      continue
    method: Any = getattr(layer, 'quant_method', None)
    if hasattr(method, 'embedding'):  # what embeds can be a tied head
      method.process_weights_after_loading(layer)


def _check_loaded(owners: dict[str, Any]) -> None:
  """Raises LoadError for a layer that no tensor was loaded into, or only in part."""
  from vllm.model_executor.model_loader.reload import layerwise

  partly = []
  for name, layer in owners.items():
    info = layerwise.get_layerwise_info(layer)
    own = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
    # A layer that is complete has been processed already, and is no longer loading.
    if info.can_load() and info.load_numel < own:
      partly.append(f'{info.load_numel} of {own} numbers of {name} were loaded')
  if partly:
    raise LoadError(f'{partly[0]} ({len(partly)} such)')


def _abandon(model: Any) -> None:
  """Ends a load that failed, so that another can start: unfinished layers keep what they had."""
  from vllm.model_executor.model_loader.reload import layerwise

  for layer in model.modules():
    info = layerwise.get_layerwise_info(layer)
    if info.can_load():
      if info.kernel_tensors is not None:
        layerwise._place_kernel_tensors(layer, info)
      info.reset()
