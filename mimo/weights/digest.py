"""A hash of a policy, by which a run knows again what it began from."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import pathlib

from mimo.weights import huggingface, steps
from mimo.weights.store import hash_file

_WORKERS = 4


def policy_digest(root: str | os.PathLike[str]) -> str:
  """Returns the SHA-256 of a policy's files, of their names and contents, as hexadecimal digits.

  Of a Hugging Face directory those that `open_policy` reads, and of an Orbax step all. Whole files
  are read, several at a time.

  Args:
    root: a step, or a Hugging Face directory (`Source.root`).

  Raises:
    OSError: a file cannot be read.
  """
  root = pathlib.Path(root)
  if steps.is_step(root):
    files = [path for path in root.rglob('*') if path.is_file()]
  else:
    names = (huggingface.CONFIG, *huggingface.TOKENIZER_FILES)
    files = [*root.glob('*.safetensors*'), *(root / name for name in names)]
  files = sorted(path for path in files if path.is_file())
  with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
    blobs = list(pool.map(hash_file, files))
  whole = hashlib.sha256()
  for path, blob in zip(files, blobs, strict=True):
    whole.update(f'{path.relative_to(root).as_posix()}\0{blob.sha256}\n'.encode())
  return whole.hexdigest()
