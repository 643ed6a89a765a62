"""Checkpoints of a run, by Orbax: complete or not there, and never foreign."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.config import ConfigError
from train.fingerprint import fingerprint

# What may not change between a checkpoint and the run that resumes it. All
# else (steps, cadences, where it is logged) is free. The gain on held-out
# questions is paired by question, hence `eval_questions`.
IDENTITY = (
  'model',
  'task',
  'task_fingerprint',
  'prompt_fingerprint',
  'stop',
  'reward',
  'parameters',
  'weights_fingerprint',
  'arm',
  'lr',
  'loss_scaler',
  'reward_scale',
  'kl_penalty',
  'advantage',
  'loss',
  'clip_low',
  'clip_high',
  'aggregation',
  'updates',
  'micro_batch',
  'filter_groups',
  'refill_rounds',
  'correction',
  'correction_cap',
  'prompts',
  'group',
  'max_new_tokens',
  'temperature',
  'compute_dtype',
  'remat',
  'seed',
  'eval_questions',
)

_STATE = 'state_fingerprint'


class CheckpointError(ConfigError):
  """A checkpoint that cannot be written or resumed from."""


class Checkpoints:
  """The checkpoints of one run folder, the last few kept.

  A checkpoint is a directory that appears under its final name only when it
  is complete; a run that is killed while writing leaves the one before.
  """

  def __init__(self, folder: Path, *, keep: int):
    """Opens (and with the first `save` makes) `folder / 'checkpoints'`.

    Args:
      folder: of the run.
      keep: how many checkpoints stay.
    """
    self._path = (folder / 'checkpoints').resolve()
    self._keep = keep
    self._opened = None

  def save(self, step: int, state: Any, identity: dict[str, Any]) -> None:
    """Writes a checkpoint and waits until it is complete.

    Args:
      step: optimizer steps done.
      state: pytree of arrays.
      identity: what a resuming run must share, see `IDENTITY`.

    Raises:
      CheckpointError: if it cannot be written; earlier ones are intact.
    """
    try:
      manager = self._manager()
      if step in manager.all_steps():
        return
      manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(_named(state)),
          identity=ocp.args.JsonSave(identity | {_STATE: fingerprint(state)}),
        ),
      )
      manager.wait_until_finished()
    except Exception as error:  # Orbax, TensorStore and the OS: many types
      last = self.latest_step()
      kept = 'there is none yet' if last is None else f'step {last} is intact'
      raise CheckpointError(
        f'the checkpoint of step {step} could not be written to {self._path}: '
        f'{_first_line(error)}; the last complete checkpoint: {kept}'
      ) from error

  def latest_step(self) -> int | None:
    """The step of the last complete checkpoint, or None."""
    return max(self._steps(), default=None)

  def restore(self, state: Any, identity: dict[str, Any]) -> tuple[int, Any]:
    """Reads the last complete checkpoint.

    Args:
      state: the state of a fresh run: its tree, shapes, dtypes, shardings.
      identity: of the resuming run.

    Returns:
      The steps done, and the state.

    Raises:
      CheckpointError: if there is none, it cannot be read, or belongs to
        another run.
    """
    step = self.latest_step()
    if step is None:
      raise CheckpointError(f'{self._path} holds no complete checkpoint')
    try:
      saved = self._manager().restore(
        step, args=ocp.args.Composite(identity=ocp.args.JsonRestore())
      )['identity']
    except Exception as error:
      raise self._unreadable(step, error) from error
    differing = [
      f'{name} is {identity.get(name)!r}, the checkpoint has '
      f'{saved.get(name)!r}'
      for name in IDENTITY
      if saved.get(name) != identity.get(name)
    ]
    if differing:
      raise CheckpointError(
        f'the checkpoint in {self._path} is of another run: '
        + '; '.join(differing)
      )
    named = _named(state)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, named)
    try:
      restored = self._manager().restore(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
          )
        ),
      )['state']
    except Exception as error:
      raise self._unreadable(step, error) from error
    leaves = [restored[name] for name in named]
    state = jax.tree.unflatten(jax.tree.structure(state), leaves)
    # Older checkpoints have none.
    if _STATE in saved and fingerprint(state) != saved[_STATE]:
      raise self._unreadable(step, ValueError('its values are not as saved'))
    return step, state

  def _steps(self) -> list[int]:
    if not self._path.is_dir():
      return []
    return [int(p.name) for p in self._path.iterdir() if p.name.isdigit()]

  def _manager(self) -> ocp.CheckpointManager:
    if self._opened is None:
      self._opened = ocp.CheckpointManager(
        self._path,
        options=ocp.CheckpointManagerOptions(
          max_to_keep=self._keep, enable_async_checkpointing=False
        ),
        # Weights hardly compress, and a copy of all of them at once would be
        # the peak of a run's memory.
        item_handlers={
          'state': ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=1,
            save_device_host_concurrent_gb=1,
            use_compression=False,
          ),
          'identity': ocp.JsonCheckpointHandler(),
        },
      )
    return self._opened

  def _unreadable(self, step: int, error: Exception) -> CheckpointError:
    earlier = [before for before in self._steps() if before < step]
    hint = ''
    if earlier:
      hint = (
        f'. Without the folder {self._path / str(step)} the run goes on from '
        f'step {max(earlier)}'
      )
    return CheckpointError(
      f'the checkpoint of step {step} in {self._path} cannot be read: '
      f'{_first_line(error)}{hint}'
    )


def _named(state: Any) -> dict[str, jax.Array]:
  """The leaves by path: a tree that any container type can be read back to."""
  leaves = jax.tree_util.tree_flatten_with_path(state)[0]
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _first_line(error: Exception) -> str:
  text = str(error).strip().splitlines()
  return f'{type(error).__name__}: {text[0] if text else ""}'[:300]
