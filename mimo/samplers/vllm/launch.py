"""How a vLLM server with the plugin is started: its command line and its environment.

    ServerSettings -> server_command, server_environment -> a process that answers on `port`

Nothing here imports vLLM or starts a process.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

# The name of both entry points, and what VLLM_PLUGINS must hold for vLLM to load them.
PLUGIN = 'mimo'
WORKER_EXTENSION = 'mimo.samplers.vllm.internals.WorkerExtension'
SCHEDULER = 'mimo.samplers.vllm.internals.block_scheduler'

# Changes to vLLM that a server makes only where this variable names them, comma-separated.
PATCHES_VARIABLE = 'MIMO_VLLM_PATCHES'
MOE_RELOAD = 'moe_reload'  # unquantised experts on CPU are repacked at each reload, not once
NVFP4_EMULATION = 'nvfp4_emulation'  # lists vLLM's own NVFP4 emulation kernel for CPU
FAST_TOPK = 'fast_topk'  # finds many candidates of a small vocabulary by a vectorised sort on CPU
PATCHES = (MOE_RELOAD, NVFP4_EMULATION, FAST_TOPK)

DTYPES = ('float32', 'bfloat16')


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
  """A vLLM server.

  Attributes:
    model: a view directory; the server starts with its weights and serves after an activation.
    port: on `host`.
    host: the address to listen on.
    max_tokens: the longest prompt and answer together.
    max_sessions: how many requests are decoded at a time.
    max_candidates: the largest K that a request may ask for.
    dtype: 'float32' or 'bfloat16', of activations.
    head_dtype: of the head's matmul and of the logits.
    kv_cache_dtype: 'bf16' for the model's dtype, or 'fp8'.
    prefix_caching: whether prefixes are cached.
    device: 'cpu' or 'gpu'.
    cpu_cache_gib: the size of the key-value cache on CPU.
    cpu_threads: threads on CPU; None leaves it to vLLM.
    patches: of `PATCHES`.
    tokenizer: loads the view's tokenizer, which only text routes need.
    sampling_mask: on GPUs, has vLLM return the kept set of each draw.
    routes: has vLLM return the experts that tokens are sent to. Its model runner for that needs
      Triton: on CPU, a build of it with a CPU backend.
    extra: more arguments of the server, as on a command line.
  """

  model: str
  port: int
  host: str = '127.0.0.1'
  max_tokens: int = 2048
  max_sessions: int = 64
  max_candidates: int = 128
  dtype: str = 'float32'
  head_dtype: str = 'float32'
  kv_cache_dtype: str = 'bf16'
  prefix_caching: bool = True
  device: str = 'cpu'
  cpu_cache_gib: float = 1.0
  cpu_threads: int | None = None
  patches: tuple[str, ...] = ()
  tokenizer: bool = False
  sampling_mask: bool = False
  routes: bool = False
  extra: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    for name, value, expected in (
      ('dtype', self.dtype, DTYPES),
      ('head_dtype', self.head_dtype, DTYPES),
      ('kv_cache_dtype', self.kv_cache_dtype, ('bf16', 'fp8')),
      ('device', self.device, ('cpu', 'gpu')),
    ):
      if value not in expected:
        raise ValueError(f'{name} is {value!r}; expected one of {list(expected)}')
    for patch in self.patches:
      if patch not in PATCHES:
        raise ValueError(f'unknown patch {patch!r}; expected one of {list(PATCHES)}')
    if self.sampling_mask and self.device == 'cpu':
      raise ValueError("sampling_mask needs a model runner that vLLM has for device='gpu' only")
    if self.routes and not self.prefix_caching:
      raise ValueError('routes is True and prefix_caching is False; expected True: vLLM needs it')


def server_command(settings: ServerSettings, python: str = sys.executable) -> list[str]:
  """Returns the command that starts the server."""
  command = [python, '-m', 'vllm.entrypoints.openai.api_server', '--model', settings.model]
  command += ['--host', settings.host, '--port', str(settings.port)]
  command += ['--dtype', settings.dtype, '--max-model-len', str(settings.max_tokens)]
  command += ['--max-num-seqs', str(settings.max_sessions)]
  command += ['--logprobs-mode', 'processed_logprobs']
  # One more than K tells a support of K tokens from one that K cuts.
  command += ['--max-logprobs', str(settings.max_candidates + 1)]
  command += ['--worker-extension-cls', WORKER_EXTENSION, '--scheduler-cls', SCHEDULER]
  command += ['--generation-config', 'vllm']
  command += ['--enable-scale-out', '--disable-uvicorn-access-log']
  if settings.head_dtype != settings.dtype:
    command += ['--hf-overrides', f'{{"head_dtype": "{settings.head_dtype}"}}']
  if settings.kv_cache_dtype == 'fp8':
    command += ['--kv-cache-dtype', 'fp8']
  command += [
    '--enable-prefix-caching' if settings.prefix_caching else '--no-enable-prefix-caching'
  ]
  if settings.device == 'cpu':
    command += ['--enforce-eager']
  if not settings.tokenizer:
    command += ['--skip-tokenizer-init']
  if settings.sampling_mask:
    command += ['--return-sampling-mask']
  if settings.routes:
    command += ['--enable-return-routed-experts']
  return command + list(settings.extra)


def server_environment(settings: ServerSettings, base: Mapping[str, str]) -> dict[str, str]:
  """Returns `base` with what the server needs added."""
  plugins = [name for name in base.get('VLLM_PLUGINS', '').split(',') if name]
  environment = {
    **base,
    'VLLM_PLUGINS': ','.join(dict.fromkeys([*plugins, PLUGIN])),
    PATCHES_VARIABLE: ','.join(settings.patches),
    'HF_HUB_OFFLINE': '1',
    'VLLM_NO_USAGE_STATS': '1',
  }
  # Candidates of a request are arrays of some hundred bytes: a message frame for each, from the
  # engine to the API server, costs more than a copy.
  environment.setdefault('VLLM_MSGPACK_ZERO_COPY_THRESHOLD', '16384')
  if settings.routes:
    environment['VLLM_USE_V2_MODEL_RUNNER'] = '1'  # the other one has no routes
  if settings.device == 'cpu':
    # vLLM reads whole GiB.
    environment['VLLM_CPU_KVCACHE_SPACE'] = str(max(1, round(settings.cpu_cache_gib)))
    if settings.cpu_threads is not None:
      # Unbound: vLLM would bind the threads of every server to the same first cores.
      environment['VLLM_CPU_OMP_THREADS_BIND'] = 'nobind'
      environment['OMP_NUM_THREADS'] = str(settings.cpu_threads)
  return environment
